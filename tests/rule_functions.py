"""Functions for the rule `call`. Workers import this file, which imports nothing: a test's own file brings torch."""


def mentions_exit(row) -> float:
    return float("os._exit" in row.text)
