"""Settings of the trainers: what they may be, and what they need of a run."""
