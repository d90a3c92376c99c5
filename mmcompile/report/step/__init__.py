"""Reports on one balanced step."""
