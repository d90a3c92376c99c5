"""Assignment of samples to replicas and microbatches, and the plan of a step."""
