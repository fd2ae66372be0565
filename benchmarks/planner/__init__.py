"""'jhpt bench planner': the planner against brute force, a simulator and baselines."""
