"""Implementations of bitfield attention: eager PyTorch, Triton, and the dense reference."""
