"""Measurements of this machine: its devices and links, and the seconds of a model's layers on it."""
