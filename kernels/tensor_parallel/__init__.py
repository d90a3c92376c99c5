"""Ops of tensor parallelism: ranks that each hold a part of every large weight, and compute one layer together.

`ops` has the collectives at the borders of sharded regions, `vocabulary` embedding and loss over a sharded vocabulary.
"""
