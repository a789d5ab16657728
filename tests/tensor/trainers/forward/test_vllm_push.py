"""LoRA on its way to vLLM: TRL's names and weights, a layer gathered at a time, and the model left as it was."""

from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from tests import tiny
from trl_ext.trainers.generation.sampling import merged_layers, push_by_layers

OPTIONS = {
    "all-linear": dict(target_modules="all-linear"),
    "dora": dict(target_modules=["q_proj", "down_proj"], use_dora=True),
    "modules to save": dict(target_modules=["v_proj"], modules_to_save=["lm_head"]),
}


class Dist:
    """Notes how many numbers are gathered at a time."""

    is_zero3, is_fsdp, zero_stage, fsdp_version = True, False, 3, None

    def __init__(self):
        self.gathered = []

    @contextmanager
    def gather_params(self, parameters):
        self.gathered.append(sum(one.numel() for one in parameters))
        yield


def generation(model):
    made = SimpleNamespace(model=model, _dist=Dist(), accelerator=None)
    for name in ("_fix_param_name_to_vllm", "_iter_named_params"):
        setattr(made, name, MethodType(getattr(VLLMGeneration, name), made))
    return made


def adapted(family="llama", **options):
    torch.manual_seed(0)
    model = get_peft_model(tiny.model(family), LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_and_names_are_trls(options, family):
    model = adapted(family, **OPTIONS[options])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    theirs = {name: weight.clone() for name, weight in generation(model)._iter_named_params()}
    for name, parameter in model.named_parameters():  # TRL's merging and unmerging rounds
        parameter.data.copy_(before[name])
    ours = dict(merged_layers(generation(model)))  # all collected first, as the sender may
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)
    assert all(torch.allclose(parameter, before[name], atol=1e-7) for name, parameter in model.named_parameters())


def test_a_70b_model_is_gathered_a_layer_at_a_time():
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=16, target_modules="all-linear"))
    made = generation(model)
    push_by_layers(made)
    num_sent = sum(weight.numel() for _, weight in made._iter_named_params())
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert num_sent == model.num_parameters() - adapters > 70e9
    assert max(made._dist.gathered) == 128256 * 8192  # the embedding: 2 GB in bf16, and not 141
    theirs = generation(model)
    next(iter(theirs._iter_named_params()))
    assert theirs._dist.gathered == [model.num_parameters()]
