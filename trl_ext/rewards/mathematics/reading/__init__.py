"""From a text to a value that can be compared."""
