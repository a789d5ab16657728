"""Runs that are stopped and resumed, with the settings of the three configs in pairs."""
