"""Which program computes an operation."""

from typing import Literal

Implementation = Literal["reference", "mosaic"]
"""`reference`: plain jax.numpy, on any device.  `mosaic`: Pallas on NVIDIA GPUs of capability 9.0 or newer."""
