"""Processes in which rules run that may hang, crash or eat memory. `pool` is the way in."""
