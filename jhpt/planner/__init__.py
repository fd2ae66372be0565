"""Plans hybrid parallel training: cost models, dynamic programme, simulation.  Needs numpy only, no device."""

from jhpt.planner.estimate import Estimate, evaluate
from jhpt.planner.importers import read_profile
from jhpt.planner.solve import plan

__all__ = ["Estimate", "evaluate", "plan", "read_profile"]
