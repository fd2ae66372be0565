"""Finds the fastest plan of a request that fits the devices."""
