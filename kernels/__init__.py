"""Pallas GPU kernels, one folder per operation; imported as `jhpt.kernels`."""
