"""Rows that a model is trained on: looked at before the first step, those of a stream as they come; and drawn."""
