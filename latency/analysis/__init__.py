"""What measurements mean: the Pareto front, costs, the roofline."""
