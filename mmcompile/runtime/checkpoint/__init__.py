"""Checkpoints: what each rank writes and reads, and the folder that is whole or not there."""
