"""Rows, rules, and what both stand on."""
