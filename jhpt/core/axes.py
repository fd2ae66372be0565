"""Names of mesh axes."""

DATA = "data"
TENSOR = "tensor"
