"""Cost of layers in any layout and at any load."""
