"""Reports about models, plans and steps: checks, explanations, differences, simulations and pictures."""
