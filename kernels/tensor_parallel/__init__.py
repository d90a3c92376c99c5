"""Ops of tensor parallelism: ranks that each hold a part of every large weight, and compute one layer together.

`boundary_ops` has the collectives at the borders of sharded regions, `vocabulary` the embedding and loss over a sharded
vocabulary.
"""
