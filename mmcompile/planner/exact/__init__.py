"""Splits of chains into stages under a user's constraints, the slowest proved fastest by Z3; or constraints that conflict."""
