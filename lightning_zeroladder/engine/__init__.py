"""The only part that touches DeepSpeed's internals: engines, where they keep state, and how it moves.

Submodules are imported one by one: most of them need torch.distributed.
"""
