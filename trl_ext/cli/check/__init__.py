"""`trl-ext check RECIPE`: check a run without starting it."""
