"""Tables of `trl-ext plan`: plans, the best plan's memory by phase and term, refusals."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trl_ext.memory.files.settings import launch_lines
from trl_ext.memory.formulas import generation
from trl_ext.memory.formulas.activations import LOGIT_BYTES, head_forward_bytes
from trl_ext.memory.formulas.estimate import TIGHT_FRAC, Estimate
from trl_ext.memory.formulas.peak import room_bytes
from trl_ext.memory.formulas.times import generation_seconds
from trl_ext.memory.job import servers_of
from trl_ext.memory.planner.planner import Plans
from trl_ext.memory.planner.search import Search, vllm_label
from trl_ext.memory.units import gib, in_gib

HEADINGS = {"generate": "generate", "score": "score", "update": "update", "step": "optimizer step"}
HEADINGS |= {"weight_push": "weight push", "load": "load"}
BATCHED = 1.25  # most that continuous batching gains over plain generate (huggingface/trl, pull request 5765)
BALANCED = 0.3  # sides that differ by a smaller share are balanced, because seconds are rough


def print_plans(plans: Plans, folder: str | None, rows: int | None = None, *, names_model: bool = True) -> None:
    """Print everything that the planner found, with the launch lines.

    Args:
        plans: Plans that fit, best first, and refusals with their reasons.
        folder: The folder to which the plan was written, for the launch lines; None if it was not.
        rows: Rows of the dataset, for the time that all of them take once; None leaves it out.
        names_model: Whether the launch lines name the model.
    """
    console = Console(highlight=False)
    _print_question(console, plans.search)
    advice = plans.advice  # answers other questions to the planner, so it is read once
    roomier: list[str] = []
    if plans.plans:
        if plans.best.estimate.is_tight:
            roomier = [sentence for sentence in advice if sentence.startswith("--allow lora")]
        _print_best(console, plans, roomier, rows)
    else:
        console.print("\nNothing that keeps the optimisation fits.")
    if plans.refused:
        console.print("\nrefused")
        for reason in dict.fromkeys(refusal.reason for refusal in plans.refused):
            console.print(f"  {reason}", soft_wrap=True)
    others = [sentence for sentence in advice if sentence not in roomier]
    for sentence in (*others, *filter(None, [plans.dead_end])):
        console.print(f"\n{sentence}", soft_wrap=True)
    if plans.plans:
        where = "launch" if folder else "launch, after --write plan"
        one = plans.best
        lines = launch_lines(one.job, folder or "plan", one.estimate.hardware, names_model=names_model)
        console.print("\n  ".join([f"\n{where}", *lines]), soft_wrap=True)


def _print_question(console: Console, search: Search) -> None:
    """Print the job and the machine, and what is assumed of them."""
    lengths = f"{search.job.sequence_tokens:,} tokens a sequence, global batch {search.job.global_batch}"
    hardware, card = search.hardware, search.hardware.card
    context, links = card.total_gib - card.usable_gib, card.link.name
    if hardware.num_machines > 1:
        links += f", {hardware.network_gbit_s:.0f} Gbit/s between machines"
    each = f"{card.total_gib:.1f} GiB each, less {context:.1f} of CUDA context: {hardware.usable}; {links}"
    console.print(
        f"{search.job.trainer} of {escape(search.shape.name)} on {hardware} ({each}), {lengths}. All numbers are "
        "estimated."
    )
    if card.assumed:
        console.print(f"{escape(card.assumed)} Seconds are as good as that.", soft_wrap=True)
    if stands_for := search.shape.stands_for:
        instead = f"A '{stands_for}' has no formula: activations and times use the nearest, {search.shape.family}'s."
        console.print(f"{instead} Parameters are counted.", soft_wrap=True)
    if search.shape.is_eager:
        console.print("Rows are padded: this model's attention is eager, with T x T matrices for each head.")


def _print_best(console: Console, plans: Plans, roomier: Iterable[str], rows: int | None) -> None:
    """Print the plans that fit, and the best plan's memory and time.

    Args:
        console: Where to print.
        plans: Plans of which the best fits.
        roomier: Advice for a plan that leaves hardly any memory.
        rows: Rows of the dataset, for the time that all of them take once; None leaves it out.
    """
    best = plans.best.estimate
    table = _table("plan", "GiB", "with slack", "host GiB", "s a step, rough")
    for one in plans.plans:
        estimate = one.estimate
        peak, need = f"{estimate.peak_gib:.1f}", f"{gib(estimate.need_bytes):.1f}"
        host, seconds = f"{gib(estimate.host_bytes):.0f}", estimate.in_seconds()
        name = ", ".join(filter(None, [one.label, vllm_label(one.job)]))
        table.add_row(escape(name), peak, need, host, seconds)
    console.print(table)
    console.print(terms_table(best))
    if plans.search.hardware.host_gib is None:
        console.print("Host GiB are not compared with the machine's memory: give --host_memory_gib.")
    for sentence in (*_best_in_words(best), *(f"Roomier: {sentence}" for sentence in roomier)):
        console.print(sentence, soft_wrap=True)
    if rows:
        steps, hours = best.num_steps(rows), float(f"{best.hours(rows):.2g}")
        console.print(f"{rows:,} rows once: {steps:,} steps, about {hours:,g} hours, rough.", soft_wrap=True)


def terms_table(estimate: Estimate) -> Table:
    """Return GiB by term and phase, each phase at its peak."""
    columns = {phase: estimate.terms_gib(phase) for phase in estimate.worst}
    table = _table("GiB of the first plan", *(HEADINGS[phase] for phase in columns))
    names = dict.fromkeys(name for terms in columns.values() for name in terms)
    for name in (*(name for name in names if name != "slack"), "slack"):
        values = (terms.get(name, 0.0) for terms in columns.values())
        table.add_row(name, *(f"{value:.2f}" if value >= 0.005 else "" for value in values))
    table.add_row("total", *(f"{sum(terms.values()):.2f}" for terms in columns.values()), style="bold")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _best_in_words(estimate: Estimate) -> Iterator[str]:
    """Yield sentences: a plan's peak and time, and the assumed lengths; weights and cache on a server's card, and
    the completions that fit into that cache."""
    job, peak = estimate.job, estimate.peak
    what = {"copy": "a frozen copy (--reward_model)", "adapter": "a third adapter (--reward_adapter)", "none": "none"}
    roles = f" Critic: {job.critic} (--critic). Reward model: {what[job.reward_model]}."
    ending = roles if job.trainer == "ppo" else ""
    tight = f" Tight: within {TIGHT_FRAC:.0%} of the room that a plan may fill." if estimate.is_tight else ""
    step = f"Step of about {estimate.in_seconds()} s, rough"
    yield f"peak: {peak.what}. {step}: {estimate.parts()}.{ending}{tight}"
    if job.generates and not job.mean_completion_length:
        longest = f"{job.max_completion_length:,} tokens long"
        yield f"Seconds are for completions that are all {longest}: give --mean_completion_length."
    if job.generates:
        num_scored = min(job.scored_tokens, job.forward_tokens)
        logits = LOGIT_BYTES * estimate.shape.vocab * num_scored
        more = logits - head_forward_bytes(estimate.shape, job, num_scored)
        yield f"Full logits, as in TRL or verl without a fused head, would need {gib(max(more, 0)):.1f} GiB more."
    yield from _other_engines(estimate)
    if not job.vllm_servers:
        return
    if job.generation_ahead:
        generates = generation_seconds(estimate.setup)
        trains = estimate.step_s - estimate.seconds.get("generation", 0.0)
        waits = "the servers wait" if trains > generates else "training waits for the servers"
        advice = (
            f"{waits}: give the other side more cards" if abs(trains - generates) > BALANCED * trains else "balanced"
        )
        sides = f"{estimate.in_seconds(generates)} s of generation next to {estimate.in_seconds(trains)} s of training"
        yield f"Generated ahead: {sides}; {advice}."
    shape, card = estimate.shape, estimate.hardware.card
    weights = generation.vllm_weight_bytes(shape, job)
    tokens = generation.vllm_cache_tokens(shape, card, job)
    at_once = min(tokens // job.sequence_tokens, -(-job.global_batch // job.vllm_servers))
    each = "" if job.vllm_tensor_parallel_size == 1 else " of each"
    share_gib = gib(generation.vllm_bytes(card, job))
    yield (
        f"{estimate.num_gpus} GPUs train, {servers_of(job)}: {in_gib(weights)} of weights{each} in "
        f"{share_gib:.1f} GiB of a card, {tokens:,} tokens of cache, {at_once} completions at once."
    )


def _other_engines(estimate: Estimate) -> Iterator[str]:
    """Yield a sentence with the seconds of transformers' other ways to generate, if it generates and they fit."""
    job, setup = estimate.job, estimate.setup
    if not job.generates or job.use_vllm or job.vllm_mode == "server":
        return
    plain_s, compiled_s = generation_seconds(setup), generation_seconds(setup, is_compiled=True)
    found = [f"{estimate.in_seconds(plain_s)} s by plain generate"]
    more = generation.static_cache_bytes(estimate.shape, job, estimate.num_gpus)
    more -= generation.cache_bytes(estimate.shape, job, estimate.num_gpus)
    room = room_bytes(estimate.hardware, job, estimate.worst["generate"].num_bytes + more)
    if room >= 0 and job.zero_stage < 3 and not job.fsdp:
        found.append(f"{estimate.in_seconds(compiled_s)} s with cache_implementation: static")
    found.append(f"{estimate.in_seconds(plain_s / BATCHED)} s at best by continuous batching")
    yield f"Generation, rough: {', '.join(found)}; --use_vllm plans vLLM."


def print_what_if(before: Estimate, after: Estimate, changes: Mapping[str, Any]) -> None:
    """Print the best plan with other settings, next to the plan itself."""
    settings = ", ".join(f"{name}={value}" for name, value in changes.items())
    verdict = "fits" if after.fits else f"does not fit: {after.reason()}"
    Console(highlight=False).print(
        f"\nwhat if {escape(settings)}: {after.peak_gib:.1f} GiB instead of {before.peak_gib:.1f}, "
        f"{after.in_seconds()} s a step instead of {before.in_seconds()}, rough; {verdict}",
        soft_wrap=True,
    )
