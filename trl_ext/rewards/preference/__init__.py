"""Preference pairs, scored and filtered by rules."""
