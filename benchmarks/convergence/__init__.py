"""The cost in loss of compression (`jhpt bench convergence`) and of low-precision state and matrix products
(`jhpt bench precision`)."""
