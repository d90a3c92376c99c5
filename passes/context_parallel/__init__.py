"""The pass `context-parallel`, which shards the token dim of a graph, and its rules."""
