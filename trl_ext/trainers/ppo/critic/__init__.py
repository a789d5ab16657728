"""The three critics of PPO, and how they are saved."""
