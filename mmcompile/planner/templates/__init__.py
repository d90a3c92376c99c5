"""Planning of pipeline templates: the fastest pipeline for each number of nodes."""
