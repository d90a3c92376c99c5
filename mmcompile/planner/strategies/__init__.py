"""Layout strategies by name: our search, published searches, and baselines; the simulator compares their candidates."""
