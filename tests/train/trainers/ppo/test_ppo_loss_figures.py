"""Policy losses by TRL's names against figures that verl's and OpenRLHF's own loss functions gave on these inputs.

verl at commit 1dda039b9 (trainer/ppo/core_algos.py), OpenRLHF at 3c3be623 (models/loss.py). The figures are the loss
and its gradient by the log-probabilities.
"""

import pytest
import torch

from tests import ppo_trainers

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0.0]])
OLD = torch.tensor([[-0.5, -1.0, -0.25, -2.0], [-0.75, -0.1, 0, 0], [-1.5, -0.3, -0.6, 0], [-0.9, 0, 0, 0]])
NEW = torch.tensor([[-0.3, -1.5, -0.24, -0.4], [-1.9, -0.05, 0, 0], [-0.1, -0.9, -0.55, 0], [-0.7, 0, 0, 0]])
PER_TOKEN = torch.tensor([[1.0, -0.5, 0.25, -2.0], [0.75, -1.25, 0, 0], [-1.5, 0.5, -0.25, 0], [2.0, 0, 0, 0]])
PER_ROW = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None] * MASK
BY_ROW = dict(importance_sampling_level="sequence", advantage_estimator="rloo", num_generations=4)

OF_OPENRLHF = {
    "clip": (
        dict(cliprange=0.2),
        1.36013758,
        [[0.0, 0.0, -0.02525125, 0.99060649], [-0.02374776, 0.13140889], [0.60828006, -0.02744058, 0.02628178], [0.0]],
    ),
    "clip-higher": (
        dict(cliprange=0.2, epsilon_high=0.28),
        1.35371685,
        [
            [-0.12214028, 0.0, -0.02525125, 0.99060649],
            [-0.02374776, 0.13140889],
            [0.60828006, -0.02744058, 0.02628178],
            [-0.24428056],
        ],
    ),
    "dual clip": (
        dict(cliprange=0.2, delta=3.0),
        0.81125104,
        [[0.0, 0.0, -0.02525125], [-0.02374776, 0.13140889], [0.0, -0.02744058, 0.02628178], [0.0]],
    ),
    "gspo": (
        dict(cliprange=0.4, loss_type="grpo", **BY_ROW),
        -0.21014185,
        [[-0.08671844] * 4, [0.0], [-0.05531448] * 3, [0.15267535]],
    ),
    "mean over rows": (
        dict(cliprange=0.2, loss_type="grpo"),
        0.59385765,
        [[0.0, 0.0, -0.01578203, 0.61912906], [-0.0296847, 0.1642611], [0.50690001, -0.02286715, 0.02190148], [0.0]],
    ),
}
OF_VERL = {
    "clip-higher and dual clip": (
        dict(cliprange=0.2, epsilon_high=0.28, delta=3.0),
        0.80483019,
        [[-0.12214028, 0.0, -0.02525125], [-0.02374776, 0.13140889], [0.0, -0.02744058, 0.02628178], [-0.24428056]],
    ),
    "dual clip at 1.5": (
        dict(cliprange=0.2, delta=1.5),
        0.28625104,
        [[0.0, 0.0, -0.02525125], [-0.02374776, 0.13140889], [0.0, -0.02744058, 0.02628178], [0.0]],
    ),
    "dr_grpo": (
        dict(cliprange=0.2, delta=3.0, loss_type="dr_grpo", response_length=4),
        0.50703192,
        [[0.0, 0.0, -0.01578203], [-0.01484235, 0.08213055], [0.0, -0.01715036, 0.01642611], [0.0]],
    ),
    # verl's GSPO gives the figures of OpenRLHF's.
    "sapo": (
        dict(loss_type="sapo"),
        -0.15083683,
        [
            [-0.07540976, 0.01816774, -0.01578164, 0.03781335],
            [-0.02647203, 0.16414216],
            [0.07574419, -0.02174176, 0.02188562],
            [-0.6032781],
        ],
    ),
    # verl bounds the weight on both sides of 1; its bounds were 0 and 2.
    "cispo": (
        dict(loss_type="cispo", epsilon_high=2.0),
        0.0270008,
        [
            [-0.12214028, 0.03032653, -0.02525125, 0.40000001],
            [-0.02374776, 0.13140889],
            [0.30000001, -0.02744058, 0.02628178],
            [-0.24428056],
        ],
    ),
}
CASES = [(project, name) for project, cases in (("openrlhf", OF_OPENRLHF), ("verl", OF_VERL)) for name in cases]


def ours(settings, folder):
    """The loss of the trainer with these settings, by its own `_compute_loss`, and its gradient."""
    settings = dict(advantage_estimator="reinforce_pp", gradient_accumulation_steps=1, kl_coef=0.0) | settings
    trainer = ppo_trainers.trainer("none", folder, **settings)
    logps = NEW.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **options: (logps, torch.zeros_like(NEW), None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones_like(MASK, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=MASK, old_per_token_logps=OLD)
    inputs |= dict(
        advantages=PER_ROW if "importance_sampling_level" in settings else PER_TOKEN, num_items_in_batch=MASK.sum()
    )
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), logps.grad


@pytest.mark.parametrize("project, name", CASES)
def test_a_policy_loss_is_theirs(project, name, tmp_path):
    settings, expected, rows = (OF_OPENRLHF if project == "openrlhf" else OF_VERL)[name]
    loss, gradient = ours(settings, tmp_path)
    assert loss == pytest.approx(expected, abs=1e-6)
    theirs = torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in rows])
    torch.testing.assert_close(gradient, theirs, atol=1e-6, rtol=0)
