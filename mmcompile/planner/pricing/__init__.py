"""Prices of a model's layers: seconds and bytes in any layout and at any load."""
