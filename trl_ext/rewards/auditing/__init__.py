"""Before training: `audit` asks whether rules and data fit, `redteam` what cheats earn."""
