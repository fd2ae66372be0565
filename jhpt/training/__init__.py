"""From a configuration to a trained model: data, step, loop, checkpoints, metrics."""
