"""The `Plan` value, its parts, and its text."""
