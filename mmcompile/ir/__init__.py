"""Intermediate representation: captured graphs, their components, sizes and host shape programs."""
