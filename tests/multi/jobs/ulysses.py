"""Groups of processes that share rows: what each computes of a batch."""

import torch
import torch.distributed as dist
from accelerate import Accelerator

from tests import tiny
from tests.batches import RAGGED, Batch, forked, gradient, ready_to_pack
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

FAMILIES = ("llama", "qwen3", "mistral_window", "gemma3", "qwen3_moe")
SHARING = {"shared": True, "apart": False}
CASES = {f"{family} {how}": (family, share, RAGGED) for family in FAMILIES for how, share in SHARING.items()}
CASES |= {f"{family} forked": (family, True, forked(3)) for family in ("llama", "qwen3")}
# Query and key heads where they are not 4 and 2. 4 processes make 2 lines for 6 heads, and 4 lines for 3.
HEADS = {"qwen3": (6, 3), "mistral_window": (3, 3), "qwen2": (3, 1)}
TEMPERATURE = 0.7
# Short beside the number of processes: some have only padding, most have no scored token.
BUDGETS = (None, 45)


def model(family: str, **changes: int) -> torch.nn.Module:
    queries, keys = HEADS.get(family, (4, 2))
    return tiny.model(family, num_attention_heads=queries, num_key_value_heads=keys, **changes).eval()


def subject(family: str) -> torch.nn.Module:
    return ready_to_pack(model(family), temperature=TEMPERATURE, outputs=("log_probs", "entropy"))


def shared(family: str, share_prompt: bool, given: Batch, budget: int | None, group: SequenceGroup) -> dict:
    """What a group's processes compute of the batch, and the sum of their gradients."""
    policy, flat = subject(family), unpad(given.input_ids, given.attention_mask, given.width)
    rows = plan(flat, share_prompt, budget)
    result = score(policy, flat, rows, torch.device("cpu"), len(rows) + 1, compute_entropy=True, group=group)
    own = gradient(policy, (result.logps * given.weights()).sum())
    dist.all_reduce(own, group=group.processes)
    return {
        "logps": result.logps.detach(),
        "entropies": result.entropies.detach(),
        "gradient": own,
        "num_forwarded": result.num_forwarded,
    }


def compute(folder, size: int) -> dict:
    Accelerator(cpu=True)
    group = SequenceGroup.of_world(size, 60)
    got = {(name, budget): shared(*case, budget, group) for name, case in CASES.items() for budget in BUDGETS}
    return got | {"size": size}
