"""Compiled programs: their memory, their communication, and how much of it is hidden behind computation."""
