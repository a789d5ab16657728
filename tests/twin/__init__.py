"""The memory twin, the judge of the memory formulas: the real trainers on fake tensors, which have a shape and no
data.

Under DeepSpeed its real engine runs as rank 0 of N.

    from tests.twin import run_apart, simulation_of

    result = run_apart(simulation_of(Job("grpo", method="lora"), config, num_gpus=1))
    print(result.peak_bytes, result.peaks["update"].module)

Every byte of live tensors is counted, on a machine without GPU and without weights. Light to import.
"""

from tests.twin.driver import TwinPeak, TwinResult, run_apart
from tests.twin.simulation import Simulation, simulation_of, why_not

__all__ = ["Simulation", "TwinPeak", "TwinResult", "run_apart", "simulation_of", "why_not"]
