"""Ops of FSDP: replicas hold a part of every large parameter, and gather the whole parameter for each layer."""
