"""Gradient buckets and sums, reductions, clipping, and the optimizers that update parameters."""
