"""Names of mesh axes."""

PIPE = "pipe"
REPLICA = "replica"
"""Data ranks that hold the same shards, with hybrid sharding; the others are `DATA`."""
DATA = "data"
TENSOR = "tensor"
