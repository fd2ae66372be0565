"""Search over stages with different numbers of devices (Zeng et al. 2021)."""
