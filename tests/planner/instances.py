"""Random models and clusters; the generators are those of the benchmark."""

from benchmarks.planner.instances import Instance, random_cluster, random_instance, random_profile, random_request

__all__ = ["Instance", "random_cluster", "random_instance", "random_profile", "random_request"]
