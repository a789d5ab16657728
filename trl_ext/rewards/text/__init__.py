"""Read answers out of completions: what counts, where the answer is stated, numbers, choices, prose."""
