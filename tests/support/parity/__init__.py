"""Training of published families in one process and in engines, compared step by step."""
