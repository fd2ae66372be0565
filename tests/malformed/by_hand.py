"""Input that no mutation makes: links, pipes and folders in the place of files, and what is enormous."""

from tests.malformed import files, flags, places, runs  # they register their cases
from tests.malformed.register import BY_HAND

__all__ = ["BY_HAND", "files", "flags", "places", "runs"]
