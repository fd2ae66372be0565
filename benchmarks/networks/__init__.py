"""Classic networks that the hybrid benchmark trains: a perceptron and VGG."""
