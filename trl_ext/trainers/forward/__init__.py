"""What goes through a model: completions, pairs, heads, adapters."""
