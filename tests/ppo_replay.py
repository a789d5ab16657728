"""PPO in plain torch, for tests: rows forwarded one by one, loops over tokens, torch's own AdamW.

None of this code is the package's. A trainer is recorded while it trains; its weights are then set back, and trained
again by what the documentation says. Legend: a row is one completion; T its counted tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerCallback

from tests.half_precision import cast
from tests.ppo_trainers import Gradients, distance, trained_weights

Rows = list[torch.Tensor]  # [T] of each row, empty for a row that nothing could score
OF_GROUPS = ("rloo", "grpo")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Settings:
    """What a run is trained by, under PPOConfig's names; their defaults are those of tests/ppo_trainers.py."""

    advantage_estimator: str = "gae"
    num_generations: int = 1
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    cliprange: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    kl_coef: float = 0.05
    kl_estimator: str = "k1"
    kl_term: str = "reward"
    kl_target: float | None = None
    kl_horizon: float = 10_000
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    value_normalisation: bool = False
    cliprange_value: float | None = 0.2
    vf_coef: float = 0.5
    num_ppo_epochs: int = 1
    num_mini_batches: int = 1
    temperature: float = 1.0
    response_length: int = 12
    learning_rate: float = 1e-3
    value_learning_rate: float | None = None
    adam_epsilon: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    critic_warmup_steps: int = 0


@dataclass
class Update:
    """The rollouts of one update, and which of their rows each micro-batch had."""

    rows: list[dict]
    rollouts: dict[str, torch.Tensor]
    scores: list[float]
    order: list[list[int]] = field(default_factory=list)

    def tokens(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per row: its prompt, its completion, and which tokens of it count."""
        r = self.rollouts
        counted = r["completion_mask"] * r.get("tool_mask", torch.ones_like(r["completion_mask"]))
        parts = zip(r["prompt_ids"], r["prompt_mask"], r["completion_ids"], r["completion_mask"], counted, strict=True)
        return [(p[pm.bool()], c[cm.bool()], one[cm.bool()].bool()) for p, pm, c, cm, one in parts]


def recorded(trainer: Any) -> tuple[list[Update], dict[str, Any]]:
    """Train; return the updates, and what `set_back` needs."""
    models = [m for m in (trainer.model, trainer._ppo_models.value_model) if m is not None]
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    updates: list[Update] = []
    make = trainer._generate_and_score_completions

    def noting(rows: list[dict]) -> dict:
        output = make(rows)
        if trainer.model.training:
            output["row_number"] = torch.arange(len(rows))
            kept = {k: v.clone() for k, v in output.items() if k.endswith(("_ids", "_mask"))}
            updates.append(Update(rows, kept, trainer._scores.tolist()))
        return output

    class Order(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            updates[-1].order = [batch["row_number"].tolist() for batch in trainer._buffered_inputs]

    trainer._generate_and_score_completions = noting
    trainer.add_callback(Order())
    trainer.train()
    return updates, {"models": models, "before": before}


def set_back(state: dict[str, Any], dtype: torch.dtype) -> None:
    for model, weights in zip(state["models"], state["before"], strict=True):
        cast(model, dtype).load_state_dict(weights)


# Forwards -----------------------------------------------------------------------------------------------------------


@dataclass
class Models:
    """The trainer's models, called by transformers' own forward alone."""

    actor: Any
    reference: Any  # None: the actor without its adapter
    value_model: Any
    critic: str
    temperature: float
    dtype: torch.dtype = torch.float32  # of log-probabilities and values
    autocast: bool = False

    @property
    def bare(self) -> Any:
        return self.actor.base_model.model if isinstance(self.actor, PeftModel) else self.actor

    def log_probs(self, update: Update, model: Any = None) -> Rows:
        model = self.bare if model is None else model
        found = []
        for prompt, completion, counted in update.tokens():
            if not len(completion):
                found.append(torch.zeros(0, dtype=self.dtype))
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = type(model).forward(model, input_ids=torch.cat([prompt, completion])[None]).logits[0]
            logits = logits[len(prompt) - 1 : -1].to(self.dtype) / self.temperature
            found.append(logits.log_softmax(-1).gather(1, completion[:, None])[counted, 0])
        return found

    def reference_log_probs(self, update: Update) -> Rows:
        if self.reference is not None:
            return self.log_probs(update, self.reference)
        with self.actor.disable_adapter():
            return self.log_probs(update)

    def values(self, update: Update) -> Rows:
        body, head = (
            (self.value_model.model, self.value_model.score)
            if self.critic == "separate"
            else (self.bare.model, self.bare.value_head)
        )
        found = []
        for prompt, completion, counted in update.tokens():
            if not len(completion):
                found.append(torch.zeros(0, dtype=self.dtype))
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                hidden = body(input_ids=torch.cat([prompt, completion])[None]).last_hidden_state[0]
                hidden = hidden[len(prompt) - 1 : -1][counted]
                found.append(torch.nn.functional.linear(hidden, head.weight, head.bias)[:, 0].to(self.dtype))
        return found

    def adapters_values(self, update: Update) -> Rows:
        if self.critic != "adapter":
            return self.values(update)
        self.actor.set_adapter("critic")
        found = self.values(update)
        self.actor.set_adapter("default")
        self.actor.set_requires_grad(["default", "critic"], True)
        return found


# Targets ------------------------------------------------------------------------------------------------------------


def kl_of(kind: str, new: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    if kind == "k1":
        return new - ref
    return (new - ref) ** 2 / 2 if kind == "k2" else (ref - new).exp() - (ref - new) - 1


def whitened(rows: list[list[float]], shift: bool) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    return [[(x - mean) / std + (0.0 if shift else mean) for x in row] for row in rows]


def to_come(row: list[float], gamma: float) -> list[float]:
    found: list[float] = []
    for reward in reversed(row):
        found.insert(0, reward + gamma * (found[0] if found else 0.0))
    return found


def advantages_of(
    s: Settings, rewards: list[list[float]], values: list[list[float]], baselines: list[float]
) -> list[list[float]]:
    """Per row, by the estimator's equation."""
    if s.advantage_estimator == "gae":
        found = []
        for row, value in zip(rewards, values, strict=True):
            running, own = 0.0, []
            for t in reversed(range(len(row))):
                following = value[t + 1] if t + 1 < len(row) else 0.0
                running = row[t] + s.gamma * following - value[t] + s.gamma * s.lam * running
                own.insert(0, running)
            found.append(own)
        return found
    if s.advantage_estimator == "reinforce_pp":
        return whitened([to_come(row, s.gamma) for row in rewards], shift=True)
    if s.advantage_estimator == "remax":
        return [[x - b for x in to_come(row, 1.0)] for row, b in zip(rewards, baselines, strict=True)]
    found, size = [], s.num_generations
    for i, row in enumerate(rewards):
        group = [sum(other) for other in rewards[i // size * size : (i // size + 1) * size] if other]
        if len(group) < 2 or not row:
            advantage = 0.0
        elif s.advantage_estimator == "rloo":
            advantage = sum(row) - (sum(group) - sum(row)) / (len(group) - 1)
        else:
            mean = sum(group) / len(group)
            std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
            advantage = (sum(row) - mean) / (std + 1e-6)
        found.append([advantage] * len(row))
    return found


@dataclass
class Scale:
    """Mean and standard deviation of the rewards to come, running at a rate of 0.1."""

    weight: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def follow(self, rows: list[list[float]]) -> None:
        flat = [x for row in rows for x in row]
        self.weight += 0.1 * (1 - self.weight)
        self.first += 0.1 * (sum(flat) / len(flat) - self.first)
        self.second += 0.1 * (sum(x * x for x in flat) / len(flat) - self.second)

    @property
    def mean(self) -> float:
        return self.first / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        square = self.second / self.weight if self.weight else 0.0
        variance = square - self.mean**2
        return math.sqrt(variance) if variance > square * 1e-12 else 1.0


# Losses -------------------------------------------------------------------------------------------------------------


def policy_terms(s: Settings, new: Rows, old: Rows, advantages: Rows) -> Rows:
    """Each token's term; what is one for a row stands at its every token."""
    low, high = s.cliprange, s.cliprange if s.epsilon_high is None else s.epsilon_high
    found = []
    for n, o, a in zip(new, old, advantages, strict=True):
        if not len(n):
            found.append(n * 0.0)
            continue
        log_ratio = n - o
        ratio = (log_ratio.mean() if s.importance_sampling_level == "sequence" else log_ratio).exp()
        if s.loss_type == "cispo":
            found.append(-ratio.clamp(max=high).detach() * a * n)
        elif s.loss_type == "sapo":
            tau = torch.where(a > 0, 1.0, 1.05)
            found.append(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * a)
        elif s.loss_type == "vespo":
            log_w = log_ratio.sum()
            k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
            found.append(-(lam + k * log_w - lam * log_w.exp()).exp().detach() * a * n)
        else:
            clipped = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            if s.delta is not None:  # arXiv:1912.09729, equation 5
                clipped = torch.where(a < 0, torch.maximum(clipped, s.delta * a), clipped)
            found.append(-clipped)
    return found


def mean_of(s: Settings, terms: Rows, num_tokens: float) -> torch.Tensor:
    """The loss of a micro-batch of these rows; `num_tokens` is its share of the update's tokens."""
    sums = torch.stack([term.sum() for term in terms])
    lengths = torch.tensor([float(len(term)) for term in terms]).clamp(min=1.0)
    if s.loss_type in ("grpo", "sapo"):
        return (sums / lengths).mean()
    if s.loss_type == "bnpo":
        return sums.sum() / sum(len(term) for term in terms)
    divisors = {"dr_grpo": len(terms) * s.response_length, "luspo": len(terms)}
    return sums.sum() / divisors.get(s.loss_type, num_tokens)


def value_terms(s: Settings, new: Rows, old: Rows, returns: Rows) -> Rows:
    found = []
    for n, o, r in zip(new, old, returns, strict=True):
        errors = (n - r) ** 2
        if s.cliprange_value is not None:
            errors = torch.maximum(errors, (o + (n - o).clamp(-s.cliprange_value, s.cliprange_value) - r) ** 2)
        found.append(errors / 2)
    return found


# Training -----------------------------------------------------------------------------------------------------------


@dataclass
class Replayed:
    """The weights that a replay ends with, its last step's log-probabilities, those of before, and advantages; and of
    every step the gradients by name, as they are stepped by."""

    weights: dict[str, torch.Tensor]
    new: Rows = field(default_factory=list)
    old: Rows = field(default_factory=list)
    advantages: Rows = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def replay(
    trainer: Any,
    s: Settings,
    updates: list[Update],
    state: dict[str, Any],
    greedy: Callable[[dict], float] | None = None,
    dtype: torch.dtype = torch.float32,
    turns: Callable[[Update], list[list[float]]] | None = None,
    correct: Callable[[Update, Rows], Rows] | None = None,
    half: tuple[torch.dtype, bool] | None = None,
) -> Replayed:
    """Train the trainer's models again from their first weights, on the same rollouts.

    Args:
        trainer: Whose models they are.
        s: Its settings.
        updates, state: As `recorded` returns them.
        greedy: For ReMax: the score of a row's greedy completion.
        dtype: Of all weights; another one tells how much of the result is rounding.
        turns: The rewards of each counted token, in the place of a score at the last one.
        correct: What the terms of the policy are multiplied by, from an update and its old log-probabilities.
        half: Of forwards in half precision: the dtype of the weights, and whether they run under autocast to bfloat16.
            What follows the logits and the values is in `dtype`.
    """
    weights_dtype, autocast = (dtype, False) if half is None else half
    set_back(state, weights_dtype)
    reference = None if trainer.ref_model is None else cast(trainer.ref_model, weights_dtype)
    m = Models(
        trainer.model, reference, trainer._ppo_models.value_model, trainer._critic.name, s.temperature, dtype, autocast
    )
    named = {n: p for n, p in m.actor.named_parameters() if p.requires_grad}
    in_actors = [p for n, p in named.items() if "value_head" in n or ".critic." in n]
    critic = list(m.value_model.parameters()) if m.critic == "separate" else in_actors
    actor = [p for p in named.values() if not any(p is own for own in in_actors)]
    optimizers = [torch.optim.AdamW(groups_of(s, actor, critic, m.critic), eps=s.adam_epsilon, lr=s.learning_rate)]
    if m.critic == "separate":
        optimizers.append(torch.optim.AdamW(groups_of(s, [], critic, "none"), eps=s.adam_epsilon))
    scale, coefficient, num_steps, result = Scale(), s.kl_coef, 0, Replayed({})
    noted = Gradients(trainer)
    noted.on_train_begin()
    as_rows = lambda rows: [torch.tensor(row, dtype=dtype) for row in rows]  # noqa: E731
    for update in updates:
        with torch.no_grad():
            old = m.log_probs(update)
            ref = m.reference_log_probs(update) if s.kl_coef else old
            outputs = m.adapters_values(update) if m.critic != "none" else [row * 0.0 for row in old]
            kls = [kl_of(s.kl_estimator, n, r).tolist() for n, r in zip(old, ref, strict=True)]
            baselines = [0.0 if greedy is None else greedy(row) for row in update.rows]
        rewards = [[-coefficient * x if s.kl_term == "reward" else 0.0 for x in row] for row in kls]
        if turns is not None:
            rewards = [
                [x + y for x, y in zip(*both, strict=True)] for both in zip(rewards, turns(update), strict=True)
            ]
        else:
            for row, score in zip(rewards, update.scores, strict=True):
                if row:
                    row[-1] += score
        if s.whiten_rewards:
            rewards = whitened(rewards, shift=False)
        if s.value_normalisation:
            scale.follow([to_come(row, s.gamma) for row in rewards])
        values = [[scale.mean + scale.std * x for x in row.tolist()] for row in outputs]
        found = advantages_of(s, rewards, values, baselines)
        returns = [
            [(a + v - scale.mean) / scale.std for a, v in zip(*both, strict=True)]
            for both in zip(found, values, strict=True)
        ]
        advantages = as_rows(whitened(found, shift=True) if s.advantage_estimator == "gae" else found)
        returns = as_rows(returns)
        if s.kl_target is not None:
            episodes = [sum(row) for row in kls if row]
            error = sum(episodes) / len(episodes) / s.kl_target - 1
            coefficient *= 1 + min(max(error, -0.2), 0.2) * len(update.rows) / s.kl_horizon
        num_tokens = sum(map(len, old)) / len(update.order)  # of a micro-batch's share
        weights = [torch.ones_like(row) for row in old] if correct is None else correct(update, old)
        accumulation = len(update.order) // s.num_mini_batches
        for _ in range(s.num_ppo_epochs):
            for start in range(0, len(update.order), accumulation):
                if num_steps == trainer.state.max_steps:
                    break
                new = m.log_probs(update)
                terms = policy_terms(s, new, old, advantages)
                policy = [term * weight for term, weight in zip(terms, weights, strict=True)]
                loss = value_loss = torch.zeros((), dtype=dtype)
                kl = [kl_of(s.kl_estimator, n, r) for n, r in zip(new, ref, strict=True)]
                micro_batches = update.order[start : start + accumulation]
                chosen = [i for rows in micro_batches for i in rows]
                for rows in micro_batches:
                    loss = loss + mean_of(s, [policy[i] for i in rows], num_tokens) / accumulation
                if s.kl_term == "loss":
                    loss = loss + coefficient * sum(kl[i].sum() for i in chosen) / num_tokens / accumulation
                if m.critic != "none":
                    terms = value_terms(s, m.adapters_values(update), outputs, returns)
                    value_loss = s.vf_coef * sum(terms[i].sum() for i in chosen) / num_tokens / accumulation
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (loss + value_loss).backward()
                if num_steps < s.critic_warmup_steps:
                    for weight in actor:
                        weight.grad = None
                clip(s, actor, critic, m.critic)
                for optimizer in optimizers:
                    optimizer.step()
                noted.on_step_end()
                num_steps += 1
                result = Replayed({}, [row.detach() for row in new], old, advantages)
    noted.on_train_end()
    result.weights, result.gradients = trained_weights(trainer), noted.steps
    set_back(state, torch.float32)
    if reference is not None:
        cast(reference, torch.float32)
    return result


def check(trainer: Any, s: Settings, tolerance: float = TOLERANCE, **options: Any) -> Replayed:
    """Train, and once more by the replay: every trained part moves, and ends with the same weights."""
    before = trained_weights(trainer)
    updates, state = recorded(trainer)
    ours, again = trained_weights(trainer), replay(trainer, s, updates, state, **options)
    assert all((ours[name] - before[name]).abs().max() > 0 for name in before)
    assert distance(ours, again.weights) < tolerance
    return again


def groups_of(s: Settings, actor: list[Any], critic: list[Any], kind: str) -> list[dict]:
    """Groups of an optimizer: matrices decay, biases and norms do not."""
    own = [] if kind == "separate" else critic
    rates = s.learning_rate, s.learning_rate if s.value_learning_rate is None else s.value_learning_rate
    return [
        {"params": [p for p in part if (p.ndim > 1) == decays], "lr": rate, "weight_decay": s.weight_decay * decays}
        for part, rate in zip((actor, own), rates, strict=True)
        for decays in (True, False)
        if any((p.ndim > 1) == decays for p in part)
    ]


def clip(s: Settings, actor: list[Any], critic: list[Any], kind: str) -> None:
    if kind == "separate":
        torch.nn.utils.clip_grad_norm_(critic, s.max_grad_norm)
        torch.nn.utils.clip_grad_norm_(actor, s.max_grad_norm)
    else:
        torch.nn.utils.clip_grad_norm_([*actor, *critic], s.max_grad_norm)
