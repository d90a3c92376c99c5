"""Passes over a `ModelGraph`, one file each. `pipeline.Pipeline` runs them, in the order of `catalog`.

Helpers of passes are in folders: cost/ (FLOPs, bytes and growth of an op), masks/ (forms of attention masks),
context_parallel/ (rules of the token dim), tensor_parallel/ (regions of sharded ops, and their validation).
"""
