"""Forwards through a model: completions, pairs, heads, adapters."""
