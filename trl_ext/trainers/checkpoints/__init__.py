"""Checkpoints that are complete or absent, and that record which run they belong to."""
