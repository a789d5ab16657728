"""Log-probabilities that updates start from."""
