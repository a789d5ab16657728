"""Preference pairs: made from samples that rules score, and filtered by what rules say of them."""
