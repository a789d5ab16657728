"""Define the rules that ship, one file each."""
