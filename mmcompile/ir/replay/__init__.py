"""Replays: a model's Python run again for each batch, to find what a captured graph needs of it."""
