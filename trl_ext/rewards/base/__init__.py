"""Rows and rules, with their HTTP client and the shaping of values."""
