"""`jhpt bench comms`: tensor-parallel blocks whose sums overlap with computation, travel in few bits, or both."""
