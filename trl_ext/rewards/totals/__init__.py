"""From the verdicts of several rules to one reward per completion."""
