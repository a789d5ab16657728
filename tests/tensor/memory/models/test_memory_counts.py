"""Parameter counts from configs equal `numel` of the real classes on the meta device."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.plans import config
from trl_ext.errors import ConfigError
from trl_ext.memory.models.families import FAMILIES, shape_from_config
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import lm_params, lora_params, quantised_weights, scorer_params

SMALL = dict(vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6)
SMALL |= dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
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


def test_a_model_has_as_many_parameters_as_counted(subtests):
    for family, changes in VARIANTS:
        config = small(family, **changes)
        with subtests.test(family, **changes):
            count = lm_params(shape_from_config(config.to_diff_dict()))
            assert count == numel(on_meta(AutoModelForCausalLM, config))
    for family in FAMILIES:  # what a config leaves out means the family's default
        config = CONFIG_MAPPING[family](num_hidden_layers=2)
        with subtests.test(family, default=True):
            count = lm_params(shape_from_config({"model_type": family, "num_hidden_layers": 2}))
            assert count == numel(on_meta(AutoModelForCausalLM, config))
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "qwen3_moe"):
        config = small(family, num_labels=1)  # a score head instead of the language's
        with subtests.test(family, is_scorer=True):
            count = scorer_params(shape_from_config(config.to_diff_dict()))
            assert count == numel(on_meta(AutoModelForSequenceClassification, config))


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


# Families without a formula of their own ---------------------------------------------------------------------------

TOWER_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "patch_size")
GEMMA_TOWER = dict(zip(TOWER_SIZES, (1152, 4304, 16, 27, 14), strict=True), image_size=896, vision_use_head=False)
GEMMA_TOWER |= {"model_type": "siglip_vision_model"}
QWEN_TOWER = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
QWEN_TOWER |= {"patch_size": 14}


def gemma3(**text):
    """The config.json of google/gemma-3-*, which leaves out what is its class's default."""
    architectures = ["Gemma3ForConditionalGeneration"]
    text = {"model_type": "gemma3_text", **text}
    return dict(architectures=architectures, model_type="gemma3", text_config=text, vision_config=GEMMA_TOWER)


# Of Qwen/Qwen2.5-VL-7B-Instruct: the sizes of its text stand beside its tower's.
QWEN_VL = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    **config("qwen2_5_vl", 152064, 3584, 18944, 28, 28, kv_heads=4, tie_word_embeddings=False),
    vision_config=QWEN_TOWER,
)
QWEN35_TEXT = dict(hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8)
QWEN35_TEXT |= dict(num_key_value_heads=2, linear_num_value_heads=16, max_position_embeddings=262144)
QWEN35 = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    tie_word_embeddings=True,
    text_config=dict(model_type="qwen3_5_text", tie_word_embeddings=True, **QWEN35_TEXT),
    vision_config=dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=1024),
)
# Of Qwen/Qwen3.5-35B-A3B: the sizes of its text are its class's defaults.
QWEN35_MOE = dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"],
    model_type="qwen3_5_moe",
    text_config=dict(model_type="qwen3_5_moe_text", hidden_size=2048, num_experts=256, max_position_embeddings=262144),
    vision_config=dict(out_hidden_size=2048),
)
GEMMA_12B = dict(num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8)
GEMMA_27B = dict(num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16, head_dim=128)
WITHOUT_FORMULA = {
    "gemma-3-4b": (gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34), 4_300_079_472),
    "gemma-3-12b": (gemma3(hidden_size=3840, intermediate_size=15360, **GEMMA_12B), 12_187_325_040),
    "gemma-3-27b": (gemma3(hidden_size=5376, intermediate_size=21504, **GEMMA_27B), 27_432_406_640),
    "qwen2.5-vl-7b": (QWEN_VL, 8_292_166_656),
    # Without the layer that predicts a second token: 873,438,784 with it in the publisher's file.
    "qwen3.5-0.8b": (QWEN35, 852_985_920),
    "qwen3.5-35b-a3b": (QWEN35_MOE, 35_107_181_936),  # of 35,951,822,704
}


@pytest.mark.parametrize("name", WITHOUT_FORMULA)
def test_a_model_without_a_formula_is_counted_as_published_by_transformers_own_class(name):
    config, published = WITHOUT_FORMULA[name]
    shape = shape_from_config(config, name)
    assert lm_params(shape) == published
    hidden = (config.get("text_config") or config)["hidden_size"]
    assert (shape.stands_for, shape.hidden) == (config["model_type"], hidden)


@pytest.mark.parametrize(
    ("family", "nearest"),
    [
        ("qwen3_5", "qwen3"),
        ("qwen3_5_moe", "qwen3_moe"),
        ("qwen3_next", "qwen3_moe"),
        ("gemma4", "gemma3_text"),
        ("gemma4_text", "gemma3_text"),
        ("gemma4_unified", "gemma3_text"),
    ],
)
def test_the_default_of_a_family_without_a_formula_is_planned_by_the_nearest(family, nearest):
    config = CONFIG_MAPPING[family]()
    text = config.get_text_config()
    shape = shape_from_config(config.to_dict())
    assert shape.family == nearest
    assert (shape.num_layers, shape.hidden) == (text.num_hidden_layers, text.hidden_size)
    assert lm_params(shape) == numel(on_meta(AutoModelForCausalLM, config))


@pytest.mark.parametrize("absent", [{"num_experts": None}, {"num_local_experts": 0}, {"num_local_experts": None}])
def test_a_number_of_experts_that_is_none_or_zero_is_no_mixture(absent):
    assert shape_from_config({**CONFIG_MAPPING["qwen3_5_text"]().to_dict(), **absent}).family == "qwen3"


def test_the_table_has_gemma_3_as_it_is_counted():
    for name in ("4b", "12b", "27b"):
        counted = shape_from_config(WITHOUT_FORMULA[f"gemma-3-{name}"][0])
        assert find_shape(f"google/gemma-3-{name}-it").extra_params == counted.extra_params


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-35B-A3B", "Qwen2.5-VL-7B-Instruct"])
def test_the_table_gives_the_shape_that_the_config_gives(name):
    config = WITHOUT_FORMULA[name.lower().removesuffix("-instruct")][0]
    of_config, of_table = shape_from_config(config, name), find_shape(f"Qwen/{name}")
    assert replace(of_table, name=name, max_positions=0) == replace(of_config, max_positions=0)


def test_a_config_of_which_no_model_can_be_made_is_a_sentence():
    with pytest.raises(ConfigError, match="me is a 'qwen3_5', which has no formula, and transformers cannot make"):
        shape_from_config({"model_type": "qwen3_5", "text_config": {"hidden_size": "wide"}}, "me")
    with pytest.raises(
        ConfigError, match=r"me is a 'qwen3_99', which has no formula, and .* does not know 'qwen3_99'"
    ):
        shape_from_config({"model_type": "qwen3_99"}, "me")
