"""LoRA on a base in bfloat16 goes to vLLM merged, and the base stays what it was, to the bit."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests import grpo_trainers, sampling_servers, tiny
from tests.ppo_trainers import distance, stir

SETTINGS = dict(use_vllm=True, vllm_mode="server", rollout_func=None, max_completion_length=3, learning_rate=1e-2)
OPTIONS = {
    "all-linear": ("llama", dict(target_modules="all-linear")),
    "dora": ("llama", dict(target_modules=["q_proj", "down_proj"], use_dora=True)),
    "rslora": ("llama", dict(target_modules=["v_proj"], use_rslora=True, modules_to_save=["lm_head"])),
    "biases": ("qwen2", dict(target_modules=["q_proj", "v_proj"], lora_bias=True)),
    "embeddings": ("llama", dict(target_modules=["embed_tokens", "o_proj"])),
    "experts": (
        "qwen3_moe",
        dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"]),
    ),
}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a trainer of LoRA on a base in bfloat16, beside servers that sample by the weights that were pushed."""

    def made(options=None, family="llama", folder="", **changes):
        class Servers(sampling_servers.SamplingServers):
            policy_of = staticmethod(lambda: tiny.model(family).bfloat16())

        sampling_servers.install(monkeypatch, Servers)
        config = LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options or OPTIONS["all-linear"][1])
        model = tiny.model(family).bfloat16()
        return grpo_trainers.trainer(tmp_path / folder, model=model, peft_config=config, **SETTINGS | changes)

    return made


def frozen(trainer):
    return {name: weight.clone() for name, weight in trainer.model.named_parameters() if not weight.requires_grad}


def as_pushed(trainer, mode):
    """What a push gives vLLM, by its names."""
    generation, pushed = trainer.vllm_generation, {}
    if mode == "server":
        note = lambda metadata, named: pushed.update({name: weight.clone() for name, weight in named})  # noqa: E731
        generation.vllm_client.update_named_params = note
    else:
        load = SimpleNamespace(load_weights=pushed.update)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=load))
        engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        generation.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
    generation.mode, generation.enable_sleep_mode = mode, False
    generation.sync_weights()
    return pushed


@pytest.mark.parametrize(("name", "mode"), [*((name, "server") for name in OPTIONS), ("all-linear", "colocate")])
def test_what_is_pushed_is_the_merged_model_and_the_base_stays(name, mode, make):
    family, options = OPTIONS[name]
    trainer = stir(make(options, family))
    base = frozen(trainer)
    pushed = as_pushed(trainer, mode)
    assert distance(frozen(trainer), base) == 0
    unmerged = {name: weight.clone() for name, weight in tiny.model(family).bfloat16().named_parameters()}
    merged = dict(trainer.model.float().merge_and_unload().named_parameters())
    assert pushed.keys() == merged.keys()
    for name, weight in pushed.items():
        assert weight.dtype == unmerged[name].dtype or "lm_head" in name  # PEFT trains whole modules in float32
        truth, most = merged[name].data, merged[name].abs().max().item()
        if "use_dora" in options or "experts" in name:  # PEFT rounds within these, too
            torch.testing.assert_close(weight.float(), truth, rtol=2**-7, atol=most * 2**-9)
        else:
            assert torch.equal(weight, truth.to(weight.dtype))
    assert any(not torch.equal(weight, unmerged[name]) for name, weight in pushed.items())


def test_an_exception_in_the_middle_of_a_push_leaves_the_base_as_it_was(make):
    trainer = stir(make())
    base = frozen(trainer)

    def lost(metadata, named):
        for number, _ in enumerate(named):
            if number == 5:
                raise ConnectionError("the server is gone")

    trainer.vllm_generation.vllm_client.update_named_params = lost
    with pytest.raises(ConnectionError):
        trainer.vllm_generation.sync_weights()
    assert distance(frozen(trainer), base) == 0
    trainer.model.merge_adapter()  # a layer that is merged already would stay as it is, with a warning
    assert distance(frozen(trainer), base) > 0
