"""Training that continues when nodes die: pipelines of different templates, layers copied between nodes, steps committed once."""
