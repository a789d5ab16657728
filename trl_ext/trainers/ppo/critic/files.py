"""The critic's files, in `critic/` in the actor's folder: loadable by plain transformers and PEFT.

adapter    a LoRA for AutoModelForTokenClassification with one label; its `score` is the value head
head       score.safetensors: weight and bias of the value head, for the same class on the actor's weights
separate   the value model as `save_pretrained` writes it

critic.json has the kind, `intercept` and `slope`: value = intercept + slope x output, in units of the score.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from trl_ext.compat.distributed import takes_whole_weights
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.roles import CRITIC
from trl_ext.trainers.forward.value_head import NAME

FOLDER = "critic"
_ADAPTER, _ADAPTER_CONFIG, SCORE = "adapter_model.safetensors", "adapter_config.json", "score.safetensors"
_SCORE_IN_ADAPTER = "base_model.model.score."
_KIND, _STATE, OPTIMIZER = "critic.json", "ppo.json", "optimizer.pt"


def without_value_head(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the actor's weights only."""
    return {name: value for name, value in state_dict.items() if f"{NAME}." not in name}


def value_head_of(state_dict: dict[str, Any] | None, head: nn.Linear) -> dict[str, Any]:
    """Return the value head's weight and bias in float32, from a gathered state dict if it has them."""
    found = {n.rsplit(".", 1)[1]: v for n, v in (state_dict or {}).items() if f"{NAME}." in n} or head.state_dict()
    return {name: value.detach().float().cpu().contiguous() for name, value in found.items()}


def write_kind(output_dir: str, kind: str, line: dict[str, float]) -> None:
    """Write the kind of critic, and `line`, the intercept and slope of its values."""
    folder = Path(output_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _KIND).write_text(json.dumps({"critic": kind} | line))


def write_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write running statistics and the KL coefficient."""
    (Path(checkpoint) / _STATE).write_text(json.dumps(state))


def has_state(checkpoint: str) -> bool:
    """Return True if `read_state` finds its file."""
    return (Path(checkpoint) / _STATE).is_file()


def read_state(checkpoint: str) -> dict[str, Any]:
    path = Path(checkpoint) / _STATE
    if not has_state(checkpoint):
        raise ConfigError(
            f"The checkpoint {checkpoint} has no {_STATE}: it was saved with save_only_model. Give it as the model of "
            "a new run, or resume from a whole checkpoint."
        )
    return json.loads(path.read_text())


def complete_adapter(output_dir: str, head: dict[str, Any], rewards: Sequence[str]) -> None:
    """Add the head to the critic's LoRA that PEFT saved; delete the frozen reward adapters."""
    folder = Path(output_dir) / FOLDER
    weights = load_file(folder / _ADAPTER)
    save_file(weights | {_SCORE_IN_ADAPTER + name: value for name, value in head.items()}, folder / _ADAPTER)
    config = json.loads((folder / _ADAPTER_CONFIG).read_text())
    config |= {"task_type": "TOKEN_CLS", "modules_to_save": ["score"]}
    (folder / _ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    for name in rewards:
        shutil.rmtree(Path(output_dir) / name, ignore_errors=True)


def check(checkpoint: str, kind: str) -> None:
    """Raise ConfigError unless the checkpoint has a critic of this kind."""
    path = Path(checkpoint) / FOLDER / _KIND
    found = json.loads(path.read_text())["critic"] if path.is_file() else None
    if found is None:
        raise ConfigError(
            f"The checkpoint {checkpoint} holds no critic, so PPO cannot go on from it. Resume from a checkpoint "
            "of PPOTrainer, or give the folder as the model of a new run."
        )
    if found != kind:
        raise ConfigError(
            f"The checkpoint {checkpoint} holds critic='{found}'. Set critic='{found}' to resume from it."
        )


def load_adapter(checkpoint: str, model: Any, head: nn.Linear) -> None:
    """Load the critic's LoRA and head from a checkpoint. Collective under FSDP2."""
    weights = load_file(Path(checkpoint) / FOLDER / _ADAPTER)
    own = {n.removeprefix(_SCORE_IN_ADAPTER): v for n, v in weights.items() if n.startswith(_SCORE_IN_ADAPTER)}
    load_head(head, own)
    lora = {n: v for n, v in weights.items() if not n.startswith(_SCORE_IN_ADAPTER)}
    with takes_whole_weights(model):
        set_peft_model_state_dict(model, lora, adapter_name=CRITIC)


def load_head(head: nn.Linear, weights: dict[str, Any]) -> None:
    """Load a value head's whole weights. Collective under FSDP2."""
    with takes_whole_weights(head):
        head.load_state_dict(weights)
