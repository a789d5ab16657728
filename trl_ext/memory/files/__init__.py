"""The files of a plan: recipe, launch files, `plan.json`."""
