"""A bandit with a known optimum: completions of one of 20 tokens, a reward by token, a KL to the policy that began.

The best policy is that reference times exp(reward / beta), normalised (arXiv:2305.18290, equation 4); its objective
is beta log sum of reference times exp(reward / beta). Every estimator and every critic has to land on it: at the best
policy every token's reward less its KL is the same, so that no advantage is left, GRPO's over the standard deviation
neither.
"""

import pytest
import torch

from tests import ppo_trainers, tiny
from tests.faults.starting import IS_THOROUGH
from tests.ppo_trainers import CRITICS
from trl_ext.compat.peft import base_model

BETA, STEPS, EPISODES, TOKENS = 0.2, 40, 128, 20
KINDS = [*((critic, "gae") for critic in CRITICS), *(("none", e) for e in ("reinforce_pp", "rloo", "grpo", "remax"))]
SEEDS = range(3) if IS_THOROUGH else [0]


def rewards():
    return torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))


def logps_of(model, ids):
    with torch.no_grad():
        return type(model).forward(model, input_ids=ids).logits[0, -1].log_softmax(0)


def objective(logps, ref):
    return (logps.exp() * (rewards() - BETA * (logps - ref))).sum().item()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("critic", "estimator"), KINDS if IS_THOROUGH else KINDS[1:2] + KINDS[3:5])
def test_the_optimum_is_reached(critic, estimator, seed, tmp_path):
    table = rewards().tolist()
    shape = dict(vocab_size=TOKENS, num_hidden_layers=1)
    model = tiny.model("llama", **shape)
    model.lm_head.weight.data *= 10  # initial weights of 0.02 make all tokens equally likely
    ids = torch.tensor([tiny.tokenizer()("w5 w6")["input_ids"]])
    ref = logps_of(model, ids)
    best = BETA * torch.logsumexp(ref + rewards() / BETA, 0).item()
    settings = {} if critic == "none" else dict(vf_coef=0.5)
    if critic == "separate":
        settings["value_model"] = ppo_trainers.classifier(**shape)
    trainer = ppo_trainers.trainer(
        critic, tmp_path, model=model, advantage_estimator=estimator, rollout_func=None, seed=seed,
        reward_funcs=lambda completion_ids, **_: [table[one[0]] for one in completion_ids],
        data=ppo_trainers.Dataset.from_dict({"prompt": ["w5 w6"] * 2 * EPISODES}), response_length=1, kl_coef=BETA,
        num_generations=EPISODES if estimator in ("rloo", "grpo") else 1, per_device_train_batch_size=EPISODES,
        gradient_accumulation_steps=1, max_steps=STEPS, adam_epsilon=1e-8, logging_steps=STEPS, packing=False,
        learning_rate=2e-3 if critic == "adapter" else 1e-3, lr_scheduler_type="cosine", **settings,
    )  # fmt: skip
    trainer.train()
    reached = objective(logps_of(base_model(trainer.model), ids), ref)
    print(f"{critic} {estimator} seed {seed}: {objective(ref, ref):.4f} -> {reached:.4f}, best {best:.4f}")
    assert objective(ref, ref) < 0.9 * best
    assert reached >= best - 0.01 * abs(best)
