"""Mask words, their builder, and the block plans that kernels read."""
