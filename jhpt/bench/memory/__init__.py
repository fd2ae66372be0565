"""Benchmarks of memory: choices against the best, bytes against the compiler's, and on a GPU steps in a budget."""
