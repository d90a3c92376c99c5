"""Datasets as numbers (shapes of samples and their joint distribution), and batches of samples."""
