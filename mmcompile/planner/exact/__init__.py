"""Exact cuts under a user's constraints, proved optimal by Z3; or a smallest set of constraints that conflict."""
