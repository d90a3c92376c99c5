"""What tests share: models, plans, graphs, processes, oracles."""
