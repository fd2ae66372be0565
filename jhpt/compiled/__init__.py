"""Compiled programs: what they hold in memory, send between devices and hide behind computation."""
