"""What is true, computed in the plainest way: eager gradients and single-process training."""
