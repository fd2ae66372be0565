"""Errors of a lab; those of its hosts are in `processes`."""


class LabError(RuntimeError):
    """The kernel or a program refused what a lab needs."""
