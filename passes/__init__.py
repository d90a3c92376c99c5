"""Passes over a `ModelGraph`, one file each; `pipeline.Pipeline` runs them.

Analyses: verify, gradient_flow, cost, layers, modality_dag. Shared by them: values (what a node computes), op_flops,
op_backward and op_memory (what an op costs), op_load (how that grows), cost_table (the result), text (how a graph
prints), debug (`MMCOMPILE_DEBUG`).
"""
