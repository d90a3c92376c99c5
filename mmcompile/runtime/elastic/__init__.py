"""Training that continues when nodes die: unlike pipelines at once, state copied between nodes, steps that count once."""
