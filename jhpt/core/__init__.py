"""What everything else speaks about: configuration, model shapes, errors.  No jax."""
