"""Captures of earlier runs on the disk."""
