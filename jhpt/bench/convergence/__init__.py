"""`jhpt bench convergence`: what compression costs in loss."""
