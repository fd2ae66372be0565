"""Benchmarks behind jhpt's claims; run them from a checkout with 'jhpt bench NAME'."""
