"""Every plan of a decision set; the oracle is that of the benchmark."""

from benchmarks.planner.oracle import best, general_plans, optimum, plan_of, spmd_plans

__all__ = ["best", "general_plans", "optimum", "plan_of", "spmd_plans"]
