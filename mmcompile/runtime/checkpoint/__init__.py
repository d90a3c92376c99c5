"""Checkpoints: the tensors that each rank writes and reads, and the atomic replacement of the folder."""
