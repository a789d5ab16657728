"""Parameter counts from configs equal `numel` of the real classes on the meta device."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_ext.memory.models.families import FAMILIES, shape_from_config
from trl_ext.memory.models.shapes import lm_params, lora_params, quantised_weights, scorer_params

SMALL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_local_experts": 4}
# What makes a family itself, beside its defaults.
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    ("mistral", {"head_dim": 24}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 64, "qkv_bias": False}),
]


def small(family, **changes):
    mixture = SMALL_MIXTURE if FAMILIES[family].is_mixture else {}
    return CONFIG_MAPPING[family](**{**SMALL, **mixture, **changes})


def on_meta(model_class, config):
    with torch.device("meta"):
        return model_class.from_config(config)


def numel(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_language_model_has_as_many_parameters_as_counted(family, changes):
    config = small(family, **changes)
    assert lm_params(shape_from_config(config.to_diff_dict())) == numel(on_meta(AutoModelForCausalLM, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_means_the_familys_default(family):
    config = CONFIG_MAPPING[family](num_hidden_layers=2)
    assert lm_params(shape_from_config({"model_type": family, "num_hidden_layers": 2})) == numel(
        on_meta(AutoModelForCausalLM, config)
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "qwen3_moe"])
def test_a_reward_model_has_a_score_head_instead_of_the_languages(family):
    config = small(family, num_labels=1)
    shape = shape_from_config(config.to_diff_dict())
    assert scorer_params(shape) == numel(on_meta(AutoModelForSequenceClassification, config))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_lora_on_all_projections_adds_as_many_as_peft_does(family):
    from peft import LoraConfig, get_peft_model

    config = small(family)
    model = get_peft_model(on_meta(AutoModelForCausalLM, config), LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_params(shape_from_config(config.to_diff_dict()), 4) == trained


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bitsandbytes_finds_the_projections_of_the_layers(family):
    config = small(family)
    layers = on_meta(AutoModelForCausalLM, config).model.layers
    weights = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    assert quantised_weights(shape_from_config(config.to_diff_dict())) == weights
