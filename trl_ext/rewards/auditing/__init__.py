"""Checks before training: `audit` tests whether rules and data fit, `redteam` what cheats earn."""
