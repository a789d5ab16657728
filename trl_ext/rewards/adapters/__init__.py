"""Rule sets as reward functions of other trainers: verl, OpenRLHF, and any that asks over HTTP."""
