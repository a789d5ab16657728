"""PPO's numbers: advantages, losses, the reference."""
