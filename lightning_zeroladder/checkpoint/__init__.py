"""Checkpoints on disk: read any layout, write any layout, without torch and without running what a file says."""
