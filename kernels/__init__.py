"""GPU kernels, one folder per operation; imported as `jhpt.kernels`.

Every folder holds the same files: `reference` defines what the operation means, in plain jax.numpy, and runs anywhere;
`mosaic` is the Pallas kernel for Hopper and newer; `specs` are arguments on which tests compare and benchmarks time the
two.  The operation itself, in the folder's `__init__`, takes `implementation=` and never guesses.
"""
