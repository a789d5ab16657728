"""When memory runs out: halve the micro-batch on all ranks, with the same gradients, or say what would fit."""
