"""The parts of `lightning_zeroladder.proving`: what to run, the processes, the ranks, and the verdict."""
