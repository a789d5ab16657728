"""Formulas for the bytes and seconds of a job."""
