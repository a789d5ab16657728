"""Shapes of well-known models, for machines without their config.json: what each differs in from its family's default.

Facts from the models' config.json files. `num_params` is the count that their publishers' weight files hold (tied
weights once); a test holds the table against it.
"""

from typing import Any

LLAMA2 = {"model_type": "llama", "max_position_embeddings": 4096}
LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
QWEN25 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "max_position_embeddings": 40960}
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32768}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _model(num_params: int, family: dict[str, Any], sizes: tuple[int, ...], **others: Any) -> tuple[int, dict]:
    return num_params, {**family, **dict(zip(_SIZES, sizes, strict=True)), **others}


_8K, _128K = {"max_position_embeddings": 8192}, {"max_position_embeddings": 131072}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_BIG_QWEN = {"vocab_size": 152064, **_UNTIED}

# name: (published parameters, config.json). Sizes: layers, hidden, intermediate, heads, key/value heads.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "meta-llama/Llama-2-7b": _model(6_738_415_616, LLAMA2, (32, 4096, 11008, 32, 32)),
    "meta-llama/Llama-2-13b": _model(13_015_864_320, LLAMA2, (40, 5120, 13824, 40, 40)),
    "meta-llama/Llama-2-70b": _model(68_976_648_192, LLAMA2, (80, 8192, 28672, 64, 8)),
    "meta-llama/Meta-Llama-3-8B": _model(8_030_261_248, LLAMA3, (32, 4096, 14336, 32, 8), **_8K),
    "meta-llama/Meta-Llama-3-70B": _model(70_553_706_496, LLAMA3, (80, 8192, 28672, 64, 8), **_8K),
    "meta-llama/Llama-3.1-8B": _model(8_030_261_248, LLAMA3, (32, 4096, 14336, 32, 8), **_128K),
    "meta-llama/Llama-3.1-70B": _model(70_553_706_496, LLAMA3, (80, 8192, 28672, 64, 8), **_128K),
    "meta-llama/Llama-3.3-70B": _model(70_553_706_496, LLAMA3, (80, 8192, 28672, 64, 8), **_128K),
    "meta-llama/Llama-3.2-1B": _model(1_235_814_400, LLAMA3, (16, 2048, 8192, 32, 8), head_dim=64, **_128K, **_TIED),
    "meta-llama/Llama-3.2-3B": _model(3_212_749_824, LLAMA3, (28, 3072, 8192, 24, 8), head_dim=128, **_128K, **_TIED),
    "Qwen/Qwen2.5-0.5B": _model(494_032_768, QWEN25, (24, 896, 4864, 14, 2), **_TIED),
    "Qwen/Qwen2.5-1.5B": _model(1_543_714_304, QWEN25, (28, 1536, 8960, 12, 2), **_TIED),
    "Qwen/Qwen2.5-3B": _model(3_085_938_688, QWEN25, (36, 2048, 11008, 16, 2), **_TIED),
    "Qwen/Qwen2.5-7B": _model(7_615_616_512, QWEN25, (28, 3584, 18944, 28, 4), **_BIG_QWEN),
    "Qwen/Qwen2.5-14B": _model(14_770_033_664, QWEN25, (48, 5120, 13824, 40, 8), **_BIG_QWEN),
    "Qwen/Qwen2.5-32B": _model(32_763_876_352, QWEN25, (64, 5120, 27648, 40, 8), **_BIG_QWEN),
    "Qwen/Qwen2.5-72B": _model(72_706_203_648, QWEN25, (80, 8192, 29568, 64, 8), **_BIG_QWEN),
    "Qwen/Qwen3-0.6B": _model(596_049_920, QWEN3, (28, 1024, 3072, 16, 8), **_TIED),
    "Qwen/Qwen3-1.7B": _model(1_720_574_976, QWEN3, (28, 2048, 6144, 16, 8), **_TIED),
    "Qwen/Qwen3-4B": _model(4_022_468_096, QWEN3, (36, 2560, 9728, 32, 8), **_TIED),
    "Qwen/Qwen3-8B": _model(8_190_735_360, QWEN3, (36, 4096, 12288, 32, 8), **_UNTIED),
    "Qwen/Qwen3-14B": _model(14_768_307_200, QWEN3, (40, 5120, 17408, 40, 8), **_UNTIED),
    "Qwen/Qwen3-32B": _model(32_762_123_264, QWEN3, (64, 5120, 25600, 64, 8), **_UNTIED),
    "Qwen/Qwen3-30B-A3B": _model(
        30_532_122_624,
        {"model_type": "qwen3_moe"},
        (48, 2048, 6144, 32, 4),
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "mistralai/Mistral-7B-v0.1": _model(7_241_732_096, MISTRAL, (32, 4096, 14336, 32, 8)),
    "mistralai/Mistral-7B-v0.3": _model(7_248_023_552, MISTRAL, (32, 4096, 14336, 32, 8), vocab_size=32768),
    "mistralai/Mixtral-8x7B-v0.1": _model(
        46_702_792_704, {"model_type": "mixtral"}, (32, 4096, 14336, 32, 8), max_position_embeddings=32768
    ),
    "HuggingFaceTB/SmolLM2-135M": _model(134_515_008, SMOLLM2, (30, 576, 1536, 9, 3)),
    "HuggingFaceTB/SmolLM2-360M": _model(361_821_120, SMOLLM2, (32, 960, 2560, 15, 5)),
    "HuggingFaceTB/SmolLM2-1.7B": _model(1_711_376_384, SMOLLM2, (24, 2048, 8192, 32, 32)),
    "HuggingFaceTB/SmolLM3-3B": _model(
        3_075_098_624, {"model_type": "smollm3"}, (36, 2048, 11008, 16, 4), max_position_embeddings=65536
    ),
    "google/gemma-2-2b": _model(2_614_341_888, {"model_type": "gemma2"}, (26, 2304, 9216, 8, 4)),
    "google/gemma-2-9b": _model(9_241_705_984, {"model_type": "gemma2"}, (42, 3584, 14336, 16, 8)),
    "google/gemma-2-27b": _model(27_227_128_320, {"model_type": "gemma2"}, (46, 4608, 36864, 32, 16), head_dim=128),
    "google/gemma-3-1b": _model(
        999_885_952,
        {"model_type": "gemma3_text"},
        (26, 1152, 6912, 4, 1),
        vocab_size=262144,
        max_position_embeddings=32768,
    ),
    "microsoft/Phi-3-mini-4k": _model(3_821_079_552, {"model_type": "phi3"}, (32, 3072, 8192, 32, 32)),
    "microsoft/phi-4": _model(
        14_659_507_200,
        {"model_type": "phi3"},
        (40, 5120, 17920, 40, 10),
        vocab_size=100352,
        max_position_embeddings=16384,
    ),
    "openai/gpt-oss-20b": _model(
        20_914_757_184, {"model_type": "gpt_oss"}, (24, 2880, 2880, 64, 8), num_local_experts=32
    ),
}

# Names whose shape is another's.
ALIASES = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-v0.2": "mistralai/Mistral-7B-v0.1",
    "huggyllama/llama-7b": "meta-llama/Llama-2-7b",
    "huggyllama/llama-13b": "meta-llama/Llama-2-13b",
}

# A size alone stands for a typical model of that size.
TYPICAL = {
    "135M": "HuggingFaceTB/SmolLM2-135M",
    "360M": "HuggingFaceTB/SmolLM2-360M",
    "0.5B": "Qwen/Qwen2.5-0.5B",
    "0.6B": "Qwen/Qwen3-0.6B",
    "1B": "meta-llama/Llama-3.2-1B",
    "1.5B": "Qwen/Qwen2.5-1.5B",
    "1.7B": "Qwen/Qwen3-1.7B",
    "3B": "Qwen/Qwen2.5-3B",
    "4B": "Qwen/Qwen3-4B",
    "7B": "Qwen/Qwen2.5-7B",
    "8B": "meta-llama/Llama-3.1-8B",
    "9B": "google/gemma-2-9b",
    "13B": "meta-llama/Llama-2-13b",
    "14B": "Qwen/Qwen2.5-14B",
    "27B": "google/gemma-2-27b",
    "32B": "Qwen/Qwen2.5-32B",
    "70B": "meta-llama/Llama-3.1-70B",
    "72B": "Qwen/Qwen2.5-72B",
}
