"""Checks and measurements for a machine with an NVIDIA GPU, which need no network there; see README.md."""
