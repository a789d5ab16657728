"""Read answers in completions: visible text, announced answers, numbers, choices, prose."""
