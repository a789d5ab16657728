"""`trl-ext generate` and `evaluate`: commands for a finished run."""
