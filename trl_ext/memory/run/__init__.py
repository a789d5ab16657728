"""A run's own settings, held against a plan."""
