"""Measured memory beside planned memory, while a run goes on."""
