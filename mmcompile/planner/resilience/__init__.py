"""Pipeline templates: one pipeline for each node count that failures may leave, planned before training starts."""
