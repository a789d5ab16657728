"""The rules that ship, one file each."""
