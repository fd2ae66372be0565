"""This machine: its devices and links, and how fast a model's layers run on it."""
