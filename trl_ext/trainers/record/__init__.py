"""Files of a run in addition to weights: its record, written before the first step, its report, its model card."""
