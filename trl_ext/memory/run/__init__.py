"""A run's settings, compared with a plan."""
