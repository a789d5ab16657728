"""`trl-ext check RECIPE`: what can be found out about a run without starting it."""
