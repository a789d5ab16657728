"""Processes in which rules run that may hang, crash or eat memory.

pool         one verdict per row, whatever the completions hold
limits       time and memory of a row, and how many workers
request      a call on its way, as pickles
link         the trainer's end: one thread
server       the fork server: deals out rows, stops what overruns
supervision  its workers: charged, swept, replaced
fork         one worker from outside
worker       and from inside
confine      what Linux keeps it in bounds with
wire         pickles go down, JSON lines come up
breaker      stops a run whose machine fails too many rows
"""
