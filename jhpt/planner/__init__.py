"""Plans hybrid parallel training: cost models, dynamic programme, simulation.  Needs numpy only, no device."""

from jhpt.planner.cost.estimate import Estimate, evaluate
from jhpt.planner.profiles.importers import read_profile
from jhpt.planner.search.solve import plan

__all__ = ["Estimate", "evaluate", "plan", "read_profile"]
