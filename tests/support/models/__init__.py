"""Small models."""
