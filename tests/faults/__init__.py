"""Runs that are killed or find a damaged checkpoint, for tests: how they are made, ended, resumed and compared."""
