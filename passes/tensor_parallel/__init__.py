"""The passes `tensor-parallel` and `sharded-parameters`, and their rules."""
