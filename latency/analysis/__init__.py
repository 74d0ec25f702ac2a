"""Analysis of measurements: the Pareto front, costs, the roofline."""
