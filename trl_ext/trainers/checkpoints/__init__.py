"""Checkpoints that are whole, and that know which run they belong to."""
