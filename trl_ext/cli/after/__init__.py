"""`trl-ext merge`, `generate` and `evaluate`: what one does with a finished run."""
