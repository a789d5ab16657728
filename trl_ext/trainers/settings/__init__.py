"""Settings of the trainers: their allowed values and combinations."""
