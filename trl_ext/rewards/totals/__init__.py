"""The way from the verdicts of several rules to one reward per completion."""
