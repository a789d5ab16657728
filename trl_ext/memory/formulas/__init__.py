"""How many bytes and seconds a job takes."""
