"""The base of the three trainers."""
