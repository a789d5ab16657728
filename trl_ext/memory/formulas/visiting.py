"""The modules of a model in the order in which a pass visits them: what DeepSpeed's hooks see.

Weights of up to ten widths, norms and biases among them, are left out: ZeRO-3 keeps those whole (transformers' "auto"
of `stage3_param_persistence_threshold`). Their modules stay, for each visit is a chance to fetch ahead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import (
    ALL_LINEAR,
    Linear,
    ModelShape,
    attention_linears,
    embedding_params,
    expert_lora_params,
    expert_params,
    mlp_linears,
    num_dense_layers,
    shared_linears,
)

PERSISTENT_WIDTHS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight that ZeRO-3 gathers; compared by identity, for a tied head is the table."""

    name: str
    num: int
    is_frozen: bool


class Visit(NamedTuple):
    """A hook that fires.

    Args:
        module: Unique in the model.
        weights: Its own, and those that it takes from others.
        enters: Before the module, or after it.
        forward: Of its forward, or of its backward.
        again: A forward that backward repeats.
    """

    module: str
    weights: tuple[Weight, ...]
    enters: bool
    forward: bool = True
    again: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A module with its children in the order of their calls.

    Args:
        name: Unique in the model.
        weights: That ZeRO-3 gathers for it.
        children: Called in its forward.
        saves: Whether it keeps anything for backward itself.
        leaves: Whether DeepSpeed hears of the end of its backward: not where its inputs come by keyword, or need no
            gradient.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    children: tuple["Module", ...] = ()
    saves: bool = True
    leaves: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """What a pass goes through.

    Args:
        wrappers: Outermost first; none of them ends before the pass does. One holds the language model's head.
        embedding: The table.
        layers: From the bottom.
        tail: After the last norm: the head of a scorer.
    """

    wrappers: tuple[Module, ...]
    embedding: Module
    layers: tuple[Module, ...]
    tail: tuple[Module, ...]


def forward(module: Module, again: bool = False) -> Iterator[Visit]:
    """A module's forward."""
    yield Visit(module.name, module.weights, True, True, again)
    for child in module.children:
        yield from forward(child, again)
    yield Visit(module.name, module.weights, False, True, again)


def backward(module: Module, repeated: Module | None = None, until: str = "") -> Iterator[Visit]:
    """A module's backward. Once `until` is entered, the children of `repeated` go forward again, up to there."""
    yield Visit(module.name, module.weights, True, False)
    if repeated is not None and module.name == until:
        for child in repeated.children:
            for visit in forward(child, again=True):
                yield visit
                if visit.module == until:
                    break
            else:
                continue
            break
    for child in reversed(module.children):
        yield from backward(child, repeated, until)
    if module.leaves:
        yield Visit(module.name, module.weights, False, False)


def checkpointed_backward(layer: Module, reentrant: bool) -> Iterator[Visit]:
    """A layer's backward that first repeats its forward: whole, or until the last thing that was kept is there."""
    if not reentrant:
        yield from backward(layer, layer, _last_saver(layer))
        return
    yield Visit(layer.name, layer.weights, True, False)
    for child in layer.children:
        yield from forward(child, again=True)
    for child in reversed(layer.children):
        yield from backward(child)
    yield Visit(layer.name, layer.weights, False, False)


def _last_saver(module: Module) -> str:
    """The last module in a forward that keeps anything."""
    for child in reversed(module.children):
        if child.children and (name := _last_saver(child)):
            return name
        if not child.children and child.saves:
            return child.name
    return ""


def forward_pass(model: Model) -> Iterator[Visit]:
    """Forward through all."""
    for wrapper in model.wrappers:
        yield Visit(wrapper.name, wrapper.weights, True)
    for module in (model.embedding, Module("rotary"), *model.layers, Module("norm")):
        yield from forward(module)
    inner, *outer = reversed(model.wrappers)
    yield Visit(inner.name, inner.weights, False)
    for module in model.tail:
        yield from forward(module)
    for wrapper in outer:
        yield Visit(wrapper.name, wrapper.weights, False)


def backward_pass(model: Model, checkpoint_every: int, reentrant: bool) -> Iterator[Visit]:
    """Backward through all. The table's never ends: its input needs no gradient."""
    *outer, inner = model.wrappers
    for wrapper in outer:
        yield Visit(wrapper.name, wrapper.weights, True, False)
    for module in reversed(model.tail):
        yield from backward(module)
    yield Visit(inner.name, inner.weights, True, False)
    yield from backward(Module("norm"))
    for place, layer in reversed(tuple(enumerate(model.layers))):
        if checkpoint_every and place % checkpoint_every == 0:
            yield from checkpointed_backward(layer, reentrant)
        else:
            yield from backward(layer)
    yield Visit(model.embedding.name, model.embedding.weights, True, False)


# Models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA as visits see it; rank 0 for none."""

    rank: int = 0
    targets: tuple[str, ...] = ALL_LINEAR

    @classmethod
    def of(cls, job: Job) -> "Adapters":
        return cls(job.lora_r, job.lora_target_modules) if job.uses_lora else cls()

    def sit_on(self, linear: Linear) -> bool:
        return self.rank > 0 and (self.targets == ALL_LINEAR or linear.name in self.targets)


@lru_cache(maxsize=64)
def model_of(shape: ModelShape, adapters: Adapters, has_head: bool, num_layers: int) -> Model:
    """The model, with fewer layers if that is asked for: as many of them dense as possible."""
    is_frozen = adapters.rank > 0
    table = Weight("embed_tokens", embedding_params(shape), is_frozen)
    head = table if shape.tied else Weight("lm_head", embedding_params(shape), is_frozen)
    wrappers = [Module(""), Module("base"), Module("lm")] if is_frozen else [Module("lm")]
    if has_head:
        wrappers[-1] = Module("lm", (head,))
    layers = tuple(_layer(shape, adapters, place) for place in range(num_layers))
    scores = (Module("score.saved"),) if is_frozen else ()
    tail = () if has_head else (Module("score", (), scores),)
    return Model((*wrappers, Module("model")), Module("embed_tokens", (table,)), layers, tail)


def _layer(shape: ModelShape, adapters: Adapters, place: int) -> Module:
    def module(name: str, *children: Module, saves: bool = True, leaves: bool = True) -> Module:
        return Module(f"{place}.{name}", (), children, saves, leaves)

    linears = [_linear(shape, adapters, linear, place) for linear in attention_linears(shape)]
    *inputs, out = linears
    if shape.qk_norm:
        norms = [module("q_norm"), module("k_norm")]
        queries, keys, values = inputs
        inputs = [*inputs, *norms] if shape.num_norms == 4 else [queries, norms[0], keys, norms[1], values]
    attention = [module("self_attn", *inputs, out, leaves=False)]
    after = [module("dropout", saves=False)] if shape.fused else []
    mlp = _mlp(shape, adapters, place)
    if shape.num_norms == 4:
        blocks = [module("input_norm"), *attention, module("attn_norm"), module("mlp_norm"), mlp, module("last_norm")]
    elif shape.family == "olmo2":
        blocks = [*attention, module("attn_norm"), mlp, module("last_norm")]
    else:
        blocks = [module("input_norm"), *attention, *after, module("mlp_norm"), mlp, *after]
    return Module(str(place), (), tuple(blocks))


def _mlp(shape: ModelShape, adapters: Adapters, place: int) -> Module:
    experts = shape.experts
    if experts is None or place < num_dense_layers(shape):
        return Module(f"{place}.mlp", (), _gated(shape, adapters, mlp_linears(shape, shape.intermediate), place))
    routed = expert_params(shape)
    weights = [Weight(f"{place}.experts", routed, adapters.rank > 0)]
    if adapters.rank and adapters.targets == ALL_LINEAR:
        weights.append(Weight(f"{place}.experts.lora", expert_lora_params(shape, adapters.rank), False))
    children = [Module(f"{place}.experts", tuple(weights))]
    if linears := shared_linears(shape):
        *shared, gate = linears
        inner = Module(f"{place}.shared", (), _gated(shape, adapters, shared, place))
        children += [inner, _linear(shape, adapters, gate, place)]
    return Module(f"{place}.mlp", (), tuple(children))


def _gated(shape: ModelShape, adapters: Adapters, linears: list[Linear], place: int) -> tuple[Module, ...]:
    """The activation comes after the first projection."""
    first, *others = (_linear(shape, adapters, linear, place) for linear in linears)
    return first, Module(f"{place}.act"), *others


def _linear(shape: ModelShape, adapters: Adapters, linear: Linear, place: int) -> Module:
    """A projection. One with an adapter takes A's weight for its own as well: PEFT looks at its dtype."""
    name = f"{place}.{linear.name}"

    def weights(part: str, num: int, is_frozen: bool) -> tuple[Weight, ...]:
        return () if num <= PERSISTENT_WIDTHS * shape.hidden else (Weight(f"{name}{part}", num, is_frozen),)

    base = Module(f"{name}.W", weights(".W", linear.fan_in * linear.fan_out, adapters.rank > 0))
    if not adapters.sit_on(linear):
        return base
    down = weights(".A", adapters.rank * linear.fan_in, False)
    up = weights(".B", adapters.rank * linear.fan_out, False)
    dropout = Module(f"{name}.dropout", saves=False)
    return Module(name, down, (base, dropout, Module(f"{name}.A", down), Module(f"{name}.B", up)))
