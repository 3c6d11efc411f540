"""What changes with the number of ranks: the accumulation, the position in the epoch, and whether the stage stands.

`batch`, `position`, `sampler` and `decision` are arithmetic; `run` carries it into Lightning, `launching` learns of the
checkpoint before anything is built.
"""
