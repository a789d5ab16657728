"""Start a script in several processes: through accelerate on this machine, or through Ray."""
