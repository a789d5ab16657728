"""Processes for rules that may hang, crash or use too much memory. `pool` is the interface."""
