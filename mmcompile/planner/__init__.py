"""Planning: from captured costs and a request to a plan, by search, simulation and proof."""
