"""Search of a layout: prices, candidates, our search, published searches and baselines, all judged by the simulator."""
