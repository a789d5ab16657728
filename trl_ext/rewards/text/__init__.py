"""Read answers out of completions: anchors, boxes, numbers, choices, prose."""
