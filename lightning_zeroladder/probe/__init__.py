"""What is measured: step times, memory, the work in a batch."""
