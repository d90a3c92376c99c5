"""Torch ops that the compiled graphs call: attention kernels, tensor parallelism, and gathers of sharded parameters."""
