"""What a dataset is made of, as numbers: shapes of samples, and their joint distribution."""
