"""What the speed benchmark measures, as data: whose trainer, an update or a whole step, lengths, layers.

Rows "clock/..." measure what the constants of the planner's clock stand for: LoRA's and a full update of a 7B's layers
at so many tokens a forward, a step of so many micro-batches of next to no work, a token of transformers' generate.

The setting "dualkv" is that of DualKV's measurements (arXiv 2605.15422): a Qwen3-8B, a prompt of 8,192 tokens, 32
completions of 2,048 tokens, forwards of four sequences, gradient checkpointing, AdamW, bf16. They used eight cards and
veRL; here it is one card, and as many of the 36 layers as it holds and gets through in time.

Rows "step/..." are whole steps by each of transformers' ways to generate: "step/tail-static/trl" is TRL's with a
static cache, whose decoding only ours compiles. Texts of "tail" end by chance, with equal odds at every token.

Rows "update/dualkv-fa4/trl_ext" are ours by each of WAYS: another attention, attention's output kept over
checkpointing, fewer checkpointed layers, and all of them at once.

Rows "peers/..." are those that others publish of one H100, each with what it says there; "reward/hh" is a reward model
at the lengths of hh-rlhf, of which nobody publishes a speed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

from benchmarks.gpu.beside import predict
from benchmarks.gpu.flops import forward_flops
from benchmarks.grpo_task import Shape, lengths
from benchmarks.reward_task import SIDES, prompt_lengths
from trl_ext.memory import Job, estimate, find_shape
from trl_ext.memory.cards import PCIE4, Card, Hardware
from trl_ext.memory.models.find import MODELS
from trl_ext.memory.units import gib

MODEL = "Qwen/Qwen3-8B"
CONFIG: Mapping[str, Any] = {**MODELS[MODEL][1], "head_dim": 128, "vocab_size": 151_936}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
OURS = "trl_ext"
LIBRARIES = ("trl", OURS, "unsloth")
# Layers of a 7B in the rows of the clock, so that one takes seconds; the shape that vLLM serves beside its training.
CLOCK_LAYERS = 8
CLOCK_MODEL, VLLM_MODEL = ({**MODELS[f"Qwen/Qwen2.5-{size}"][1], "head_dim": 128} for size in ("7B", "3B"))
# Of a pair's side in the reward model's rows, tokens.
LONGEST_PAIR = 2048
# The seconds that a padded update may take, at an assumed share of the card's rate: it runs twice in a row's minutes.
UPDATE_S, ASSUMED_SHARE = 25.0, 0.4
FULL_SHAPES = {
    "update/dualkv": Shape("dualkv", 8192, 2048, 2048, 0.0, groups=1, generations=32),
    # Generation is a token a forward, and takes no layers off: fewer tokens, so that a row ends in time.
    "step/dualkv": Shape("dualkv", 8192, 512, 512, 0.0, groups=1, generations=32),
    "step/tail": Shape("tail", 256, 128, 512, 0.8, groups=4, generations=8),
    "update/tail": Shape("tail", 256, 512, 4096, 0.8, groups=4, generations=8),
}
TINY_SHAPES = {
    "update/dualkv": Shape("dualkv", 16, 6, 6, 0.0, groups=1, generations=4),
    "step/dualkv": Shape("dualkv", 16, 4, 4, 0.0, groups=1, generations=4),
    "step/tail": Shape("tail", 8, 4, 8, 0.8, groups=2, generations=2),
    "update/tail": Shape("tail", 8, 5, 12, 0.8, groups=2, generations=2),
}
# Of transformers, by the name in a row's kind: keys of TRL's config.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "static": {"cache_implementation": "static"},
    "continuous": {"use_transformers_continuous_batching": True},
}
# Packages of the attentions that PyTorch does not bring.
FLASH = {"flash_attention_3": "flash-attn-3", "flash_attention_4": "flash-attn-4"}
# Of ours alone, by the name in a row's kind: settings of a row. "all" takes the first attention that is installed, and
# of fewer checkpointed layers a card takes what its memory holds, "fewer" in smaller forwards if need be.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fa3": {"attention": "flash_attention_3"},
    "fa4": {"attention": "flash_attention_4"},
    "keep": {"checkpointing": {"keep_attention": True}},
    "fewer": {"checkpointing": {"every_n_layers": 2}},
    "all": {"checkpointing": {"keep_attention": True, "every_n_layers": 2}},
}
# Of the cache of continuous batching, which otherwise takes most of the free memory; a toy's, a few blocks.
POOL, TOY_POOL = {"max_memory_percent": 0.4}, {"num_blocks": 8, "max_batch_tokens": 64}


def _forwards(tokens: int, generations: int = 8) -> Shape:
    """Sequences of so many tokens, an eighth of them completion."""
    own = max(tokens // 8, 1)
    return Shape("clock", tokens - own, own, own, 0.0, groups=1, generations=generations)


# Shape and settings of rows of ours alone: a sequence a forward, but where vLLM generates.
OWN_ROWS: Mapping[str, tuple[Shape, Mapping[str, Any]]] = {
    "step/vllm": (Shape("vllm", 256, 512, 512, 0.0, groups=4, generations=8), {"uses_vllm": True, "micro_batch": 4}),
    **{f"clock/lora-{tokens}": (_forwards(tokens), {"method": "lora"}) for tokens in (256, 2048, 8192)},
    "clock/full-2048": (_forwards(2048), {}),
    "clock/overhead-2": (_forwards(16, 2), {}),
    "clock/overhead-16": (_forwards(16, 16), {}),
    "clock/generate": (Shape("clock", 128, 256, 256, 0.0, groups=1, generations=8), {"generates": True}),
}

PRIME_SHAPE = Shape("peers", 64, 16_320, 16_320, 0.0, groups=1, generations=2)
PRIME = "{} tokens/s, MFU {} % (PrimeIntellect-ai/prime-rl, benchmarks/baselines, 1xh100, rl, 16384)"
# Of peers, and the reward model: model, libraries, shape, settings.
PEER_ROWS: Mapping[str, tuple[str, tuple[str, ...], Shape, Mapping[str, Any]]] = {
    # Theirs: completions of median 700 and sigma 0.9 with a tenth cut at 4,096, prompts of median 256, 1,597 tokens a
    # row in the mean; weights in float32 under autocast, FlashAttention 3. Here all prompts are equally long.
    "peers/trl-1.7B": (
        *("Qwen/Qwen3-1.7B", ("trl", OURS), Shape("peers", 256, 1341, 4096, 0.9, groups=4, generations=8)),
        {"tokens": 16_384, "published": "TRL's asynchronous trainer: 7,282 tokens/s, MFU 9 % (huggingface/trl#6092)"},
    ),
    # Theirs: two rows of 16,384 tokens, one a forward, full checkpointing, FlashAttention 3, compiled.
    "peers/prime-0.6B": (
        *("Qwen/Qwen3-0.6B", (OURS,), PRIME_SHAPE),
        {"micro_batch": 1, "published": PRIME.format("11,896", 11.1)},
    ),
    "peers/prime-4B-lora": (
        *("Qwen/Qwen3-4B", (OURS,), PRIME_SHAPE),
        {"micro_batch": 1, "method": "lora", "published": PRIME.format("6,229", 21.7)},
    ),
    "reward/hh": ("Qwen/Qwen3-1.7B", ("trl", OURS), SIDES, {"micro_batch": 16, "tokens": 16_384, "trainer": "reward"}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One trainer on one shape.

    Args:
        name: "update/dualkv/trl".
        shape: Lengths in tokens.
        config: The model's config.json, scaled.
        scale: How it was scaled, in words.
        micro_batch: Sequences in a padded forward; a packed one may hold as many tokens.
        method: "full" or "lora".
        generates: True for a step with generation by transformers, False where completions are given.
        uses_vllm: True if a colocated vLLM generates.
        engine: A key of ENGINES.
        tokens: Most of a packed forward; 0 for as many as a padded one has.
        trainer: "grpo" or "reward", whose micro-batches are pairs.
        published: What others say of such a run, and where.
        attention: A key of FLASH; "" for the model's own.
        checkpointing: Options of gradient checkpointing.
    """

    name: str
    shape: Shape
    config: Mapping[str, Any]
    scale: str
    micro_batch: int = 4
    method: str = "full"
    generates: bool = False
    uses_vllm: bool = False
    engine: str = ""
    tokens: int = 0
    trainer: str = "grpo"
    published: str = ""
    attention: str = ""
    checkpointing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """One that warms up, and the measured ones, of which the median counts."""
        # Version 4 compiles kernels, some of them for long rows alone.
        return 4 if self.name.startswith("clock/") or self.attention == "flash_attention_4" else 2

    @property
    def needs(self) -> list[str]:
        """Packages without which it is skipped."""
        flash = [FLASH[self.attention]] if self.attention else []
        return [self.library, *["peft"] * (self.method == "lora"), *["vllm"] * self.uses_vllm, *flash]

    @property
    def job(self) -> Job:
        """The planner's."""
        is_ours = self.library == OURS
        if self.trainer == "reward":
            size = {"global_batch": self.shape.groups, "per_device_train_batch_size": self.micro_batch}
            size |= {"max_length": LONGEST_PAIR, "max_completion_length": self.shape.longest, "packing": is_ours}
            return Job("reward", **size, max_tokens_per_forward=self.budget if is_ours else 0)
        return Job(
            "grpo",
            method=self.method,
            global_batch=self.shape.rows,
            per_device_train_batch_size=self.micro_batch,
            max_prompt_length=self.shape.prompt,
            max_completion_length=self.shape.longest,
            num_generations=self.shape.generations,
            packing=is_ours,
            max_tokens_per_forward=self.budget if is_ours else 0,
            use_vllm=self.uses_vllm,
            checkpoint_every=self.checkpointing.get("every_n_layers", 1),
            keep_attention=self.checkpointing.get("keep_attention", False),
        )

    @property
    def completions(self) -> list[int]:
        """Tokens of the completions of each measured step, of drawn lengths where they end by chance; random weights
        hardly ever end a text."""
        is_longest = (self.generates or self.uses_vllm) and not self.shape.sigma
        return [self.shape.longest] * self.shape.rows if is_longest else lengths(self.shape, 1)

    @property
    def timed_job(self) -> Job:
        """The planner's, with a measured step's lengths: their mean, or the longest where all are padded to it."""
        if self.job.packing:
            return replace(self.job, mean_completion_length=round(sum(self.completions) / self.shape.rows))
        return replace(self.job, max_completion_length=max(self.completions))

    @property
    def engine_keys(self) -> Mapping[str, Any]:
        """Keys of TRL's config that choose how transformers generates."""
        pool = {"transformers_continuous_batching_config": TOY_POOL if self.scale == "a toy" else POOL}
        return {**ENGINES[self.engine], **(pool if self.engine == "continuous" else {})}

    @property
    def library(self) -> str:
        return self.name.split("/")[-1]

    @property
    def budget(self) -> int:
        """Most tokens of a packed forward."""
        return self.tokens or self.micro_batch * (self.shape.prompt + self.shape.longest)


def rows(scale: str, card_bytes: int | None, peak_tflops: float | None) -> list[Row]:
    """All rows, scaled to the card; the setting of DualKV first."""
    made = []
    shapes = (TINY_SHAPES if scale == "tiny" else FULL_SHAPES).items()
    for (kind, shape), engine, library in product(shapes, ENGINES, LIBRARIES):
        generates = kind.startswith("step")
        if engine and (not generates or library == "unsloth"):
            continue
        name = "-".join(filter(None, [kind, engine]))
        row = Row(f"{name}/{library}", shape, CONFIG, "", generates=generates, engine=engine)
        if scale == "tiny":
            made.append(replace(row, config={**CONFIG, **TINY}, scale="a toy", micro_batch=2))
        else:
            layers, why = layers_for(row, card_bytes, peak_tflops)
            found = f"{layers} of {CONFIG['num_hidden_layers']} layers, {why}"
            made.append(replace(row, config={**CONFIG, "num_hidden_layers": layers}, scale=found))
    made += own_rows(scale) + peer_rows(scale)
    bases = [row for row in made if row.library == OURS and row.name.startswith(("update/", "peers/trl"))]
    return made + [one for base in bases for one in ways_of(base, card_bytes)]


def ways_of(base: Row, card_bytes: int | None) -> Iterator[Row]:
    """A row of ours by each of WAYS."""
    for way, settings in WAYS.items():
        row = replace(base, name=base.name.replace(f"/{OURS}", f"-{way}/{OURS}"), **settings)
        if way == "all" and card_bytes:
            row = replace(row, attention=next(filter(has_attention, FLASH), ""))
        if card_bytes and "every_n_layers" in row.checkpointing:
            row = _within(row, card_bytes, shrinks=way == "fewer")
        yield row


def has_attention(name: str) -> bool:
    """Whether the package of a key of FLASH is installed."""
    try:
        return bool(version(FLASH[name]))
    except PackageNotFoundError:
        return False


def _within(row: Row, card_bytes: int, *, shrinks: bool) -> Row:
    """The row with as few checkpointed layers as the card holds, in smaller forwards where that is allowed.

    Where none fit by the formulas, which are some percent too high here, the smallest are tried.
    """
    hardware = Hardware(1, Card("this", gib(card_bytes), 1000, 100, PCIE4, (8, 0)))
    budgets = (row.budget, row.budget // 2, row.budget // 4) if shrinks else (row.budget,)
    for tokens, every in product(budgets, (4, 2)):
        one = replace(row, tokens=tokens, checkpointing={**row.checkpointing, "every_n_layers": every})
        if predict(find_shape(row.config), one.job, hardware, generates=False)["reserved"] <= 0.9 * card_bytes:
            return one
    return one if shrinks else replace(row, checkpointing={**row.checkpointing, "every_n_layers": 1})


def own_rows(scale: str) -> list[Row]:
    """The rows of ours alone: with vLLM, and of the clock."""
    made = []
    for kind, (shape, settings) in OWN_ROWS.items():
        row = Row(f"{kind}/{OURS}", shape, VLLM_MODEL, "all layers of a 3B", **{"micro_batch": 1, **settings})
        if kind.startswith("clock"):
            config = {**CLOCK_MODEL, "num_hidden_layers": CLOCK_LAYERS}
            row = replace(row, config=config, scale=f"{CLOCK_LAYERS} layers of a 7B")
        if "overhead" in kind or scale == "tiny":
            row = replace(row, config={**row.config, **TINY}, scale="a toy")
        if scale == "tiny":
            few = {"mean": min(shape.mean, 4), "longest": min(shape.longest, 4), "groups": 1}
            few |= {"prompt": min(shape.prompt, 16), "generations": min(shape.generations, 4)}
            row = replace(row, shape=replace(shape, **few))
        made.append(row)
    return made


def peer_rows(scale: str) -> list[Row]:
    """The rows that others publish, and the reward model."""
    made = []
    for kind, (model, libraries, shape, settings) in PEER_ROWS.items():
        config = {**MODELS[model][1], "head_dim": 128, "vocab_size": CONFIG["vocab_size"]}
        for library in libraries:
            row = Row(f"{kind}/{library}", shape, config, f"all layers of {model.split('/')[1]}", **settings)
            if scale == "tiny":
                few = replace(shape, prompt=min(shape.prompt, 16), mean=4, longest=8, groups=2, generations=2)
                row = replace(row, config={**config, **TINY}, scale="a toy", shape=few, micro_batch=1, tokens=64)
            made.append(row)
    return made


def layers_for(row: Row, card_bytes: int | None, peak_tflops: float | None) -> tuple[int, str]:
    """The most layers that the card holds and gets through in time, and which of the two decides."""
    whole = CONFIG["num_hidden_layers"]
    if card_bytes is None:
        return whole, "as many as there are"
    holds = next((n for n in range(whole, 0, -1) if needs_gib(row, n) <= 0.9 * gib(card_bytes)), 1)
    fits = whole
    if peak_tflops:
        budget = UPDATE_S * ASSUMED_SHARE * peak_tflops * 1e12
        fits = next((n for n in range(whole, 0, -1) if padded_flops(row.shape, n) <= budget), 1)
    if min(holds, fits) == whole:
        return whole, "as many as there are"
    return (holds, "what its memory holds") if holds <= fits else (fits, f"about {UPDATE_S:.0f} s a padded update")


def needs_gib(row: Row, layers: int) -> float:
    """Estimated peak of a padded update with so many layers."""
    job = replace(row.job, packing=False, max_tokens_per_forward=0)
    # Any card will do: what is asked is what the job needs.
    hardware = Hardware(1, Card("this", 80.0, 1000, 100, PCIE4, (8, 0)))
    return estimate(job, find_shape({**CONFIG, "num_hidden_layers": layers}), hardware).peak_gib


def padded_flops(shape: Shape, layers: int) -> float:
    """Of an update of padded rows, activations recomputed: four forwards."""
    longest = max(lengths(shape, 0))
    return 4 * shape.rows * forward_flops({**CONFIG, "num_hidden_layers": layers}, shape.prompt, [longest])


def needed_flops(row: Row, completions: list[int]) -> float:
    """Of an update of these completions: three forwards of every group, two where only adapters have gradients."""
    passes = 3 if row.method == "full" else 2
    return passes * sum(forward_flops(counted(row), *group) for group in groups(row, completions))


def counted(row: Row) -> Mapping[str, Any]:
    """The config whose operations count: a reward model's head has no vocabulary."""
    return {**row.config, "vocab_size": 0} if row.trainer == "reward" else row.config


def groups(row: Row, completions: list[int]) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt, and of its completions."""
    shape = row.shape
    each = prompt_lengths(shape) if row.trainer == "reward" else [shape.prompt] * shape.groups
    size = shape.generations
    return [(prompt, completions[i * size : (i + 1) * size]) for i, prompt in enumerate(each)]
