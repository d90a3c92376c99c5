"""Training on several processes: the engine, its workers and checkpoints."""
