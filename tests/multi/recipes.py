"""A recipe that trains the tiny model on the CPU, with its own rows, and a checkpoint after each second step."""

import json
from pathlib import Path

import yaml

PROMPTS = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(64)]
PAIRS = [{"prompt": f"w{i} ", "chosen": f"w{10 + i} w3", "rejected": f"w{20 + i}"} for i in range(64)]


def write_recipe(trainer: str, model: Path, folder: Path, **changes) -> str:
    """Write rows and recipe into the folder; return the recipe's path."""
    rows = PAIRS if trainer == "reward" else PROMPTS
    (folder / f"{trainer}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Half of the words: completions of a group differ.
    rule = {"rule": "pattern", "pattern": ".*w[0-9]*[02468]"}
    own = {} if trainer == "reward" else {"rules": [rule], "max_completion_length": 6}
    settings = {
        "model_name_or_path": str(model),
        "dataset_name": str(folder / f"{trainer}.jsonl"),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "eval_strategy": "no",
        "logging_steps": 1,
        **own,
        **({"num_generations": 4} if trainer == "grpo" else {}),
        **({"critic": "head"} if trainer == "ppo" else {}),
    }
    (folder / f"{trainer}.yaml").write_text(yaml.safe_dump(settings | changes))
    return str(folder / f"{trainer}.yaml")
