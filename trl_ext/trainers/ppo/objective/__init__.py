"""PPO's equations."""
