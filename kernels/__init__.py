"""Attention kernels. Each is a folder with a reference, implementations, and the torch op the graph calls."""
