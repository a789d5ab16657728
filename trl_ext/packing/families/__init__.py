"""What some families of models need in flat rows: positions by length, layers with state, images."""
