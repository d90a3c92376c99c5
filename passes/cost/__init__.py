"""The pass `cost`, and the FLOPs, bytes and kept activations of each op."""
