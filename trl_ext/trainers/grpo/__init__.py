"""GRPOTrainer, its config, and what it alone needs."""
