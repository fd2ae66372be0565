"""`jhpt bench hybrid`: plans against data parallelism and GPipe, in wall-clock time, on four emulated hosts."""
