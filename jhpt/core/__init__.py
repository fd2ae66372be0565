"""The words that all other packages share: configuration, model shapes, clusters, plans, errors.  No jax."""
