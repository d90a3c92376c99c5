"""Runs simulated over traces of spot instances, with templates and with baselines."""
