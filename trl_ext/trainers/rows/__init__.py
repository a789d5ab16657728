"""Checks of the rows of a dataset before the first step, and of a stream's rows as they arrive."""
