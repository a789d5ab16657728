"""Decide whether an answer is the gold: `equal` compares, `gate` bounds what sympy sees, `library` is math-verify."""
