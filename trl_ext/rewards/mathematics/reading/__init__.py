"""Read an answer from a text, and check its form."""
