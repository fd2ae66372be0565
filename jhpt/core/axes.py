"""Names of mesh axes."""

PIPE = "pipe"
DATA = "data"
TENSOR = "tensor"
