"""What a trained run is good for: weights from and to other libraries, text, scores."""
