"""GPU kernels, one folder per operation; imported as `jhpt.kernels`.

Every folder has the same files: `reference` defines the operation in plain jax.numpy and runs anywhere; `mosaic` is the
Pallas kernel for Hopper; `specs` has the arguments on which tests compare the two and benchmarks time them.  The
operation itself, in the folder's `__init__`, takes `implementation=` and never chooses one.
"""
