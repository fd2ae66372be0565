"""What goes wrong with a lab itself; what goes wrong in its hosts is in `processes`."""


class LabError(RuntimeError):
    """The kernel or a program refused what a lab needs."""
