"""Benchmarks on emulated hosts: what all of them share, from the launch to the rows."""
