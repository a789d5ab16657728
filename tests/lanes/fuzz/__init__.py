"""Settings drawn at random: our trainers against TRL, against plain replays, and against odd values."""
