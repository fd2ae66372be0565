"""`jhpt bench convergence`: what compression costs in loss; `jhpt bench precision`: what state in few bits does, and
products in 8."""
