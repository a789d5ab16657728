"""Processes in which rules and model-written code run that may hang, crash, eat memory or attack the machine."""
