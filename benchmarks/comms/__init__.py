"""`jhpt bench comms`: tensor-parallel blocks whose all-reduces overlap with computation, are compressed, or both."""
