"""What the three trainers share."""
