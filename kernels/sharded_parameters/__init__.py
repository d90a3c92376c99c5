"""Ops of replicas that share parameters: each holds a part of every large one and gathers the whole for each layer."""
