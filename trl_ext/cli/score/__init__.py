"""`trl-ext score`: apply, explain, audit and attack rules without training."""
