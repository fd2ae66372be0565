"""Collectives that send low-precision or selected numbers: tensor-parallel all-reduces and gradient reductions."""
