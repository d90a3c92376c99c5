"""Bitfield attention under context parallelism, where several ranks hold the tokens of a sequence."""
