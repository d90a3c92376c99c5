"""Cuts proved by Z3, under constraints; or the constraints that conflict."""
