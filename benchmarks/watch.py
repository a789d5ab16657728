"""What it costs that processes watch each other and heed signals together, in processor time of each process.

    python benchmarks/watch.py [--processes 2] [--rounds 2000] [--step_s 1.0]

One barrier of the watch every ten seconds, in a thread of its own, and one exchange of a number an optimizer step.
"""

import argparse
import os
import tempfile
import time

import torch.distributed as dist
import torch.multiprocessing as mp

from trl_ext.compat.distributed import greatest, meet, side_group
from trl_ext.trainers.ending.run_end import rounds_of

DDP_TIMEOUT_S = 1800.0  # transformers' default


def measure(rank: int, num_processes: int, num_rounds: int, step_s: float, store: str) -> None:
    """Print what rank 0 measured."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    pause_s, patience_s, _ = rounds_of(DDP_TIMEOUT_S)
    watch, numbers = side_group(60.0), side_group(60.0)
    costs_s = {}
    for name, work in (("barrier", lambda: meet(watch, patience_s)), ("exchange", lambda: greatest(0, numbers))):
        work()
        begun_s = time.process_time()
        for _ in range(num_rounds):
            work()
        costs_s[name] = (time.process_time() - begun_s) / num_rounds
    share = costs_s["barrier"] / pause_s + costs_s["exchange"] / step_s
    if rank == 0:
        for name, cost_s in costs_s.items():
            print(f"one {name}: {cost_s * 1e6:.0f} microseconds of processor time")
        print(f"of a step of {step_s:g} s: {share:.4%}; below 0.1 % for steps longer than "
              f"{costs_s['exchange'] / (0.001 - costs_s['barrier'] / pause_s):.2f} s")  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--step_s", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(measure, (given.processes, given.rounds, given.step_s, store), nprocs=given.processes)
