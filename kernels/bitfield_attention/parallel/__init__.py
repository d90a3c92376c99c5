"""Bitfield attention over a sequence whose tokens several ranks share."""
