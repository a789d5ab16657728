"""Values computed in the model's own forward, so that DDP, DeepSpeed and PEFT, which wrap it, see one normal call.

Legend: B rows, T tokens of a row, H hidden size.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.calls import calls_of
from trl_ext.trainers.forward.roles import ACTOR, CRITIC, Roles

NAME = "value_head"


@dataclass
class ActorOutput(FusedCausalLMOutput):
    """TRL's log-probabilities, with token_values [B, T]: the expected return after each token."""

    token_values: torch.Tensor | None = None


@dataclass
class TokenValues(ModelOutput):
    """Output token_values [B, T]: the expected return after each token.

    It is not named `values`: an output is a dict, whose method `values()` DeepSpeed and DDP call.
    """

    token_values: torch.Tensor | None = None


def run_in_fp32(head: nn.Linear) -> nn.Linear:
    """Make a head with one output compute in float32, whatever its dtype; it then returns [..., H] -> [...].

    In bfloat16 a value near 10 has steps of 0.06, more than most advantages.
    """

    def forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]  # for this instance only
    return head


def add_value_head(model: Any, roles: Roles | None = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Add a value head of zero weights to a causal model with TRL's fused head.

    Without `roles` each scored forward also returns `token_values`. With `roles` it does not;
    `model(..., role="critic")` runs the backbone with the critic's adapter and returns only `token_values`.

    Args:
        model: Unwrapped causal model of transformers.
        roles: Roles of the PeftModel around it.
        dtype: Dtype of the head's weights. DeepSpeed needs one dtype for all, and its optimizer has a float32 copy.
    """
    hidden_size = model.config.get_text_config().hidden_size
    head = nn.Linear(hidden_size, 1, device=model.device, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    # A submodule, so that optimizers and wrappers find it.
    model.add_module(NAME, run_in_fp32(head))
    model.role_heads = {CRITIC: NAME}
    model.roles = roles
    model.values_train_head_alone = False  # True: values have no gradient in the actor's weights
    model.forward_actor = model.forward

    # `generate` validates its arguments against the signature.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, role: str = ACTOR, **kwargs: Any) -> Any:
        if role != ACTOR:
            with nullcontext() if self.roles is None else self.roles.as_role(role):
                hidden = self.base_model(*args, **kwargs)[0]
            return TokenValues(token_values=getattr(self, self.role_heads[role])(hidden))
        if self.roles is not None or not kwargs.get("fused_lm_head"):
            return self.forward_actor(*args, **kwargs)
        with calls_of(self.base_model) as seen:
            outputs = self.forward_actor(*args, **kwargs)
        _, hidden = seen[-1]
        states = hidden[0].detach() if self.values_train_head_alone else hidden[0]
        return ActorOutput(**outputs, token_values=getattr(self, NAME)(states))

    model.forward = MethodType(forward, model)
    return head


def add_token_values(model: Any, keep_dtype: bool = False) -> nn.Linear:
    """Make a sequence or token classification model return `token_values` for `model(..., role="critic")`.

    Raises:
        ConfigError: The model has no `score` with one output on top of a backbone.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or model.base_model is model:
        raise ConfigError(
            f"value_model is a {type(model).__name__} without a layer `score` of one output on top of a backbone. "
            "Load it by AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)."
        )
    run_in_fp32(head if keep_dtype else head.float())
    model.forward_scores = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, role: str | None = None, **kwargs: Any) -> Any:
        if role is None:
            return self.forward_scores(*args, **kwargs)
        return TokenValues(token_values=self.score(self.base_model(*args, **kwargs)[0]))

    model.forward = MethodType(forward, model)
    return head


@contextmanager
def hidden_from_names(model: Any) -> Iterator[None]:
    """Remove the added heads from a model inside the block: vLLM and plain checkpoints do not have them."""
    heads = {name: model._modules.pop(name) for name in getattr(model, "role_heads", {}).values()}
    try:
        yield
    finally:
        for name, head in heads.items():
            model.add_module(name, head)


def hide_heads_from_vllm(vllm_generation: Any, model: Any) -> None:
    """Push a model's weights to vLLM without the added heads: an unknown name would stop the run."""
    push = vllm_generation.sync_weights

    def push_actor() -> None:
        with hidden_from_names(model):
            push()

    vllm_generation.sync_weights = push_actor
