"""Processes in which model-written Python runs, shut in. `api` is the way in."""
