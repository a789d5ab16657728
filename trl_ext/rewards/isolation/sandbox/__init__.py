"""Confined processes for model-written Python. `api` is the interface."""
