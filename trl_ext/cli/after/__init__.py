"""`trl-ext merge`, `generate` and `evaluate`: commands for a finished run."""
