"""What a run leaves in its folder beside weights: its record before the first step, its report, its model card."""
