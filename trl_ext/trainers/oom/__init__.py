"""When memory runs out: halve the micro-batch on all ranks and go on with the same gradients; else say what would fit.

rescue      mixed into the trainers: runs a micro-batch in pieces
pieces      what the halves of a micro-batch are, and what share of its loss each of them is
agreement   all ranks learn that one of them failed, before any other collective
books       metrics and token counts of a forward that failed are taken back; those of the pieces become one
where       in which phase of training an exception rose
remedies    what would fit instead, from a plan's formulas
message     all of it in sentences
snapshot    what the allocator says, in a file beside the checkpoints
"""
