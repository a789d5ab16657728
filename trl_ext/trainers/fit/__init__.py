"""Memory in a run: its plan, its rehearsal before step 1, and what happens when memory runs out."""
