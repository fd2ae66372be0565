"""Benchmarks that prove jhpt's claims; run them from a checkout with 'jhpt bench NAME'."""
