"""Model and data of `make quickstart`, made on this machine."""
