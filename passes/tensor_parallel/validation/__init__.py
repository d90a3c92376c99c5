"""Numerical checks that a sharded graph computes what the whole graph computes."""
