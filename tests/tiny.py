"""Tiny random models, a tiny tokenizer and ragged groups, for tests that need no download."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 199
# Settings of a trainer that computes on the CPU and reports to nobody.
QUIET_ON_CPU = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)
_COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
_COMMON |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
_COMMON |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
PACKABLE = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "query_pre_attn_scalar": 16}),
}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MIXTURE = {"qwen3_moe": ("qwen3_moe", _EXPERTS)}
# Families whose layers are told of their window by the mask alone, and one whose layers make masks of their own. A
# mixture of PhiMoE's draws random numbers in training: compare it in evaluation mode.
MASKED = {
    "phimoe_window": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "doge": ("doge", {"keep_window_size": 7}),
    "doge_window": ("doge", {"keep_window_size": 7, "sliding_window": 7}),
}
# Value heads of another size than query and key heads (multi-head latent attention).
_LATENT = dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16)
_LATENT |= dict(v_head_dim=16, head_dim=8, first_k_dense_replace=3)
LATENT = {"deepseek_v2": ("deepseek_v2", _LATENT), "deepseek_v3": ("deepseek_v3", _LATENT)}
# Positions whose frequencies depend on the length of a row beyond 48 tokens.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LONGROPE = dict(_DYNAMIC, rope_type="longrope", original_max_position_embeddings=48)
_LONGROPE |= dict(short_factor=[1.0] * 8, long_factor=[1.5 + i for i in range(8)])
STRETCHED = {
    "dynamic": ("llama", {"max_position_embeddings": 48, "rope_parameters": _DYNAMIC}),
    "longrope": ("llama", {"rope_parameters": _LONGROPE}),
}
EAGER_ONLY = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 7}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
}
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
_LINEAR |= dict(num_hidden_layers=4)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
STATEFUL = {
    "qwen3_next": ("qwen3_next", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "granite4": ("granitemoehybrid", {**_MAMBA2, "layer_types": _HYBRID, "shared_intermediate_size": 32}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 128}),
}
# Layers with state whose functions packing does not know: Mamba, lightning attention.
_MAMBA = dict(attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, num_experts=2)
OTHER_STATE = {
    "jamba": ("jamba", _MAMBA),
    "minimax": ("minimax", {"num_local_experts": 2, "num_experts_per_tok": 2}),
}


def model(name: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A random causal model of the family `name`, in float32."""
    family, own = {**PACKABLE, **MIXTURE, **MASKED, **LATENT, **STRETCHED, **EAGER_ONLY, **STATEFUL, **OTHER_STATE}[
        name
    ]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**_COMMON, **own, **changes})
    # transformers serves soft-capping and attention sinks by eager attention.
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for parameter, values in made.named_parameters():
        # A state that weighs and lasts, as in trained models: with these initial weights neither would be noticed.
        if parameter.endswith("dt_bias"):
            values.data.fill_(-4.0)
        elif parameter.endswith(("mamba.in_proj.weight", "mamba.conv1d.weight")):
            values.data *= 12
    return made


def tokenizer(words: dict[str, int] | None = None) -> PreTrainedTokenizerFast:
    """One token per word: `<pad>`, `<bos>`, `<eos>`, then `w3`, `w4`, ..., unless other words are given."""
    words = words or {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)
