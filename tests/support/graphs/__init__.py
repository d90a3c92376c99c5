"""Graphs and stage programs made by hand."""
