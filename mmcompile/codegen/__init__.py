"""Code generation: a captured graph and a plan become one Python program per stage."""
