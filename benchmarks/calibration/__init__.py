"""Figures of hardware and programs, fitted to published runs."""
