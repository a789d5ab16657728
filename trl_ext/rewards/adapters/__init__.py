"""Rule sets behind HTTP, and environments of others."""
