"""Tiny models with and without the rehearsal before step 1, one after the other, each in its own folder."""

from transformers import AutoTokenizer

import trl_ext
from tests.multi.jobs.reward import pairs
from tests.multi.jobs.shared import NUM_GENERATIONS, SETTINGS, Rollout, engine_facts, prompts, release, token_reward
from trl_ext.trainers.fit.rehearsal import rehearsal

KINDS = ("grpo", "reward", "ppo")
_TIMES = ("_s", "_time", "runtime", "per_second")


def made(kind: str, folder, model, reward_model, **changes):
    batch = dict(per_device_train_batch_size=2 if kind == "reward" else 4, gradient_accumulation_steps=2)
    settings = SETTINGS | batch | dict(max_grad_norm=0.5, packing=True) | changes
    if kind == "grpo":
        # As many forwards as ranks agree on.
        own = dict(num_generations=NUM_GENERATIONS, max_completion_length=16, max_tokens_per_forward=24)
        args = trl_ext.GRPOConfig(str(folder), **settings | own)
        return trl_ext.GRPOTrainer(model, token_reward, args, prompts(48), rollout_func=Rollout())
    if kind == "reward":
        args = trl_ext.RewardConfig(str(folder), **settings | dict(max_tokens_per_forward=110))
        tokenizer = AutoTokenizer.from_pretrained(reward_model)
        return trl_ext.RewardTrainer(reward_model, args, train_dataset=pairs(), processing_class=tokenizer)
    # With a separate critic, under DeepSpeed a second engine.
    args = trl_ext.PPOConfig(str(folder), **settings | dict(critic="separate", response_length=16))
    given = dict(train_dataset=prompts(48), reward_funcs=token_reward, rollout_func=Rollout())
    return trl_ext.PPOTrainer(args, model=model, value_model=reward_model, **given)


def train(folder, kinds=KINDS, **options) -> dict:
    """By kind, without and with the rehearsal: how often it was called, and what was logged but for times."""
    called = []
    plain = rehearsal.rehearse
    rehearsal.rehearse = lambda *args: called.append(plain(*args))
    found = {}
    for kind in kinds:
        for name, is_on in ((f"{kind}_without", False), (f"{kind}_with", True)):
            called.clear()
            trainer = made(kind, folder / name, memory_rehearsal=is_on, **options)
            trainer.train()
            trainer.save_model()
            logs = [{n: v for n, v in log.items() if not n.endswith(_TIMES)} for log in trainer.state.log_history]
            own = {"num_rehearsals": len(called), "packs": trainer._packs, "logs": logs}
            found[name] = engine_facts(trainer) | own
            release(trainer)
    return found
