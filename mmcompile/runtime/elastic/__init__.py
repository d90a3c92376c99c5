"""Training that goes on when nodes die: pipelines of unlike templates, state copied between nodes, steps committed before they count."""
