"""Training that goes on when nodes die: unlike pipelines at once, state copied between nodes, steps that count once."""
