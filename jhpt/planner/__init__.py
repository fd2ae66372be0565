"""Plans hybrid parallel training: cost models, search, explanation and simulation.  Needs no jax and no device."""

from jhpt.planner.cost.estimate import Estimate, evaluate
from jhpt.planner.profiles.importers import read_profile
from jhpt.planner.search.solve import plan

__all__ = ["Estimate", "evaluate", "plan", "read_profile"]
