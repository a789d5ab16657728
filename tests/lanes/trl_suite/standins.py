"""Makes the models, tokenizers and data that TRL's tests take from the hub: `standins.py CHECKOUT FOLDER`.

TRL's own recipes, scripts/generate_tiny_models and the scripts of its data sets, run here with the hub replaced: what
they would load comes from `Hub`, what they would push becomes a cache of the hub in FOLDER/hf, or parquet files in
FOLDER/data. A byte-level BPE, trained on TRL's documentation, stands for every tokenizer: it has the special tokens
and the chat template of the true one, and where tests write token ids as numbers, the text that they mean. No images.
"""

import importlib
import json
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

# The text of each token id that TRL's tests write as a number.
QWEN_IDS = {
    4913: '{"', 606: "name", 788: '":', 330: ' "', 64648: "multiply", 22785: "_tool", 497: '",', 16370: "arguments",
    5212: ' {"', 11248: "}}\n", 7692: "async", 93054: "_multiply", 1513: " don", 944: "'t", 1414: " know", 894: " any",
    5392: " tool", 17453: "Done", 35744: "increment", 9520: "step", 450: "de", 13477: "crement", 2765: " won",
    16252: " increment", 927: "sh", 411: "out", 1318: "text", 6023: "hi", 95642: '"}}\n', 14172: "tool", 6659: "call",
    397: ">\n", 522: "</", 314: " {", 293: " b",
}  # fmt: skip
QWEN_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
)
GLM_SPECIAL = " ".join(
    ["<|endoftext|>", *(f"<|{i}|>" for i in range(6)), "<|user|> <|assistant|> <|observation|>"]
    + [f"<|{i}|>" for i in range(6, 32)]
)
# Special tokens that `decode(skip_special_tokens=True)` keeps.
KEPT = frozenset("<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>".split())
SMALL = 32000


@dataclass(frozen=True)
class Family:
    """A tokenizer: ordinary ids, then special tokens; `roles` name some of these; a chat template that TRL ships."""

    special: str
    roles: dict[str, str]
    template: str | None
    num_ordinary: int = SMALL
    ids: dict[int, str] = field(default_factory=dict)


def roles(eos: str, pad: str, bos: str | None = None) -> dict[str, str]:
    named = {"eos_token": eos, "pad_token": pad, "bos_token": bos}
    return {role: token for role, token in named.items() if token}


def qwen(template: str) -> Family:
    return Family(QWEN_SPECIAL, roles("<|im_end|>", "<|endoftext|>"), template, 151643, QWEN_IDS)


# By a part of the name under which a recipe asks the hub; the first that fits.
FAMILIES = {
    "qwen3": qwen("qwen3"),
    "qwen": qwen("qwen2_5"),
    "glm": Family(GLM_SPECIAL, roles("<|endoftext|>", "<|endoftext|>"), "glm4moe", 151329),
    "gpt-oss": Family(
        "<|startoftext|> <|endoftext|> <|return|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        roles("<|return|>", "<|endoftext|>", "<|startoftext|>"),
        "gptoss",
    ),
    "llama": Family(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        roles("<|eot_id|>", "", "<|begin_of_text|>"),
        "llama3_2",
    ),
    "gemma": Family("<pad> <eos> <bos> <start_of_turn> <end_of_turn>", roles("<eos>", "<pad>", "<bos>"), "gemma"),
    "nemotron": Family(
        "<|endoftext|> <|im_start|> <|im_end|> <think> </think>",
        roles("<|im_end|>", "<|endoftext|>"),
        "nemotron_3_nano",
    ),
    "pythia": Family("<|endoftext|> <|padding|>", roles("<|endoftext|>", "<|padding|>"), None),
    "mistral": Family("<s> </s> <unk> <pad>", roles("</s>", "<pad>", "<s>"), None),
    "": Family(  # Cohere's Command
        "<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>",
        roles("<|END_OF_TURN_TOKEN|>", "<PAD>", "<BOS_TOKEN>"),
        "cohere2",
    ),
}
RECIPES = (
    "for_causal_lm.qwen2_for_causal_lm_2_5 for_causal_lm.qwen3_for_causal_lm for_causal_lm.qwen3_moe_for_causal_lm "
    "for_causal_lm.llama_for_causal_lm_3_2 for_causal_lm.mistral_for_causal_lm_0_2 for_causal_lm.gemma2_for_causal_lm "
    "for_causal_lm.gpt_neox_for_causal_lm for_causal_lm.gpt_oss_for_causal_lm for_causal_lm.glm4_moe_for_causal_lm "
    "for_causal_lm.cohere2_for_causal_lm for_causal_lm.nemotron_3_nano_for_causal_lm "
    "for_causal_lm.remote_for_causal_lm for_sequence_classification.qwen2_for_sequence_classification_2_5 "
    "for_sequence_classification.qwen3_for_sequence_classification "
    "for_sequence_classification.llama_for_sequence_classification_3_2"
).split()
DATA_SCRIPTS = ("generate_zen_dataset", "generate_toolcall_dataset")
REVISION = "0" * 40


class Hub:
    """Answers what the recipes ask the hub for."""

    def __init__(self, checkout: Path):
        texts = [page.read_text() for page in sorted((checkout / "docs" / "source").glob("*.md*"))]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=16000, initial_alphabet=alphabet, show_progress=False)
        )
        self._trained = json.loads(bpe.to_str())["model"]

    def tokenizer(self, name: str, **_: Any) -> PreTrainedTokenizerFast:
        family = next(family for part, family in FAMILIES.items() if part in name.lower())
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        vocabulary = {of_bytes.pre_tokenize_str(text)[0][0]: i for i, text in family.ids.items()}
        used, words = set(family.ids), [word for word in self._trained["vocab"] if word not in vocabulary]
        free = (i for i in range(family.num_ordinary) if i not in used)
        vocabulary |= dict(zip(words, free, strict=False)) | {f"Ġ<{i}>": i for i in free}
        merges = [tuple(merge) for merge in self._trained["merges"]]
        inner = Tokenizer(models.BPE(vocabulary, [m for m in merges if "".join(m) in vocabulary]))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        for token in family.special.split():
            (inner.add_tokens if token in KEPT else inner.add_special_tokens)([token])
        made = PreTrainedTokenizerFast(tokenizer_object=inner, **family.roles)
        if family.template is not None:
            made.chat_template = (
                Path(trl.__file__).parent / "chat_templates" / f"{family.template}.jinja"
            ).read_text()
        return made

    def config(self, name: str, *, revision: str | None = None, **options: Any) -> transformers.PretrainedConfig:
        tokenizer = self.tokenizer(name)
        low = name.lower()
        kind = "Qwen3Config" if "qwen3" in low else "Qwen2Config" if "qwen" in low else "LlamaConfig"
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = getattr(transformers, kind)(vocab_size=len(tokenizer), **ids, **options)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        return config

    def generation_config(self, name: str, **_: Any) -> GenerationConfig:
        tokenizer = self.tokenizer(name)
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("eos", "pad", "bos")}
        return GenerationConfig(do_sample=True, **ids)


def save(folder: Path, repository: str, *parts: Any) -> None:
    """Save a model, tokenizer and so on as the hub's cache has them."""
    home = folder / "hf" / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(REVISION)
    for part in parts:
        part.save_pretrained(snapshot)


def make_models(checkout: Path, folder: Path) -> None:
    sys.path.insert(0, str(checkout))
    hub, common = Hub(checkout), importlib.import_module("scripts.generate_tiny_models._common")
    AutoTokenizer.from_pretrained, AutoConfig.from_pretrained = hub.tokenizer, hub.config
    GenerationConfig.from_pretrained = hub.generation_config
    for name in ("check_transformers_version", "check_dtype_pattern", "print_config_diff"):
        setattr(common, name, lambda *_, **__: None)

    def keep(
        model: Any, tokenizer: Any, generation_config: Any, prefix: str, suffix: str | None = None, **_: Any
    ) -> None:
        name = "-".join(filter(None, (prefix, type(model).__name__, suffix)))
        save(folder, f"trl-internal-testing/{name}", *filter(None, (model, tokenizer, generation_config)))

    common.push_to_hub = keep
    for recipe in RECIPES:
        torch.manual_seed(0)
        try:
            importlib.import_module(f"scripts.generate_tiny_models.{recipe}")
        except Exception as error:  # one recipe less: its tests fail with TRL's classes too
            print(f"not made: {recipe}: {type(error).__name__}: {error}", flush=True)
    save(folder, "Qwen/Qwen3-4B", hub.tokenizer("qwen3"), transformers.Qwen3Config())


def make_data(checkout: Path, folder: Path) -> None:
    def keep(self: Any, repository: str, config_name: str = "default", **_: Any) -> None:
        splits = self if isinstance(self, datasets.DatasetDict) else {"train": self}
        for split, rows in splits.items():
            path = folder / "data" / repository / config_name / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            if repository.endswith("toolcall"):  # there the hub has JSON
                tools = [json.dumps(tools) for tools in rows["tools"]]
                rows = rows.remove_columns("tools").add_column("tools", tools)
            rows.to_parquet(str(path))

    datasets.Dataset.push_to_hub = datasets.DatasetDict.push_to_hub = keep
    np.random.seed(0)
    for name in DATA_SCRIPTS:
        sys.argv = [name, "--push_to_hub", "true"]
        runpy.run_path(str(checkout / "scripts" / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    checkout, folder = map(Path, sys.argv[1:3])
    make_data(checkout, folder)
    make_models(checkout, folder)
    (folder / "made").touch()
