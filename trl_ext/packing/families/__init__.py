"""Support for model families in flat rows: positions by length, layers with state, images."""
