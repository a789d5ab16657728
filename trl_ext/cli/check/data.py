"""The part of `trl-ext check` about data: eight rows, their columns and lengths, and the rules on them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.scripts import training
from trl_ext.scripts.data.look import ROLES, look_at_pairs, look_at_prompts

NUM_ROWS = 8
# What is shown of the first row and of each other one.
FIRST_ROW_CHARS, ROW_CHARS = 2000, 160


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of each split as the recipe maps them.

    Args:
        train, held_out: The first eight at most, by column; held_out is None if the run does not evaluate.
        read: All rows of both splits that were read: the first eight, or the whole of small local data.
        is_whole: True for the latter.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]] | None
    read: tuple[Any, Any]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest of the rows.

    Args:
        prompt: Of a prompt; 0 for pairs.
        side: Of a prompt with an answer; 0 for prompts alone.
        num_long: Pairs with a side beyond max_length.
        num_rows: Rows that were measured.
    """

    prompt: int = 0
    side: int = 0
    num_long: int = 0
    num_rows: int = 0


def read_rows(parsed: Parsed) -> Rows:
    """Read and map the first rows, streamed: nothing else is downloaded; small data of this machine as a whole.

    Raises:
        ConfigError, DataError: The script could not load or map the data; or a row cannot be read.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    source = training.data_source(parsed.script_args, parsed.training_args, parsed.dataset_args)
    is_whole = source.is_small and not source.streaming
    if source.mixture is not None:
        source.mixture.streaming = True
    try:
        parts: Any = (source if is_whole else replace(source, streaming=True)).load()
        if not is_whole:
            parts = [None if part is None else Dataset.from_list(list(part.take(NUM_ROWS))) for part in parts]
    except TrlExtError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"The first rows of {source.name or 'the mixture'} cannot be read: {error}.") from error
    has_template = partial(training.has_chat_template, parsed.training_args, parsed.model_args)
    mapping = parsed.script_args.mapping()
    train, held_out = (mapping.apply(part, role, has_template) for part, role in zip(parts, ROLES, strict=True))
    return Rows(_first(train), None if held_out is None else _first(held_out), (train, held_out), is_whole)


def _first(dataset: Any) -> list[dict[str, Any]]:
    return list(dataset.select(range(min(NUM_ROWS, len(dataset)))))


def check_rows(parsed: Parsed, rows: Rows, rewards: Sequence[Any], tokenizer: Any) -> list[Finding]:
    """Check columns, prompts and sides by the trainer's own checks.

    Raises:
        DataError: The trainer would refuse the rows.
    """
    from trl_ext.trainers.rows.steps import check_steps

    with _warnings() as warned, parsed.script_args.mapping().names_of_the_data():
        if parsed.trainer == "reward":
            look_at_pairs(rows.read, parsed.training_args, tokenizer)
        else:
            look_at_prompts(rows.read, parsed.model_args.model_name_or_path, parsed.training_args, rewards, tokenizer)
    if rows.is_whole and parsed.training_args.memory is None:  # else the plan may choose other batches
        check_steps(rows.read[0], parsed.training_args)
    held_out = "" if rows.held_out is None else f" and {len(rows.read[1])} held-out ones"
    columns = ", ".join(rows.train[0])
    found = [ok("data", f"{len(rows.read[0])} rows{held_out} read, with the columns {columns}.")]
    found += [note("data", sentence) for sentence in warned]
    if isinstance(rows.train[0].get("prompt"), str) and getattr(tokenizer, "chat_template", None):
        if parsed.trainer != "reward" and parsed.script_args.prompt_format is None:
            advice = "prompt_format: chat asks as a user would; prompt_format: text says that this is meant."
            found.append(note("data", "The prompts are text, and the model's chat template is not applied.", advice))
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the trainers' checks warn of within the block, instead of printing it."""
    logger = logging.getLogger("trl_ext.trainers.rows")
    sentences: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield sentences
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


# The first rows ---------------------------------------------------------------------------------------------------


def show_rows(parsed: Parsed, rows: Rows, rewards: Sequence[Any], tokenizer: Any) -> list[Finding]:
    """Show the first rows as the model reads them, with what the rules read beside them; the first one longest."""
    read = [column for rules in rewards for column in getattr(rules, "columns", ())]
    shown = ("chosen", "rejected", *read) if parsed.trainer == "reward" else tuple(read)
    options = {"add_generation_prompt": True, **(getattr(parsed.training_args, "chat_template_kwargs", None) or {})}
    found = []
    for number, row in enumerate(rows.train):
        limit = FIRST_ROW_CHARS if number == 0 else ROW_CHARS
        parts = [_cut(_rendered(row["prompt"], tokenizer, options), limit)] if "prompt" in row else []
        parts += [f"{name}: {_cut(str(row[name]), limit)}" for name in dict.fromkeys(shown) if name in row]
        found.append(ok(f"row {number}", "  |  ".join(parts)))
    return found


def _rendered(prompt: Any, tokenizer: Any, options: dict[str, Any]) -> str:
    """Return the text that the model reads; messages as they are without a template that takes them."""
    from jinja2 import TemplateError

    if not isinstance(prompt, list) or not getattr(tokenizer, "chat_template", None):
        return str(prompt)
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **options))
    except TemplateError:  # another finding says so
        return str(prompt)


def _cut(text: str, limit: int) -> str:
    """Return a text in one line, without its middle where it is long."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} [...] {text[-limit // 3 :]}"


# Lengths ----------------------------------------------------------------------------------------------------------


def measure(parsed: Parsed, rows: Rows, tokenizer: Any) -> Lengths:
    """Count the tokens of the rows; nothing without a tokenizer.

    Raises:
        ConfigError: Messages, and a tokenizer without a chat template; or a template that refuses them.
    """
    if tokenizer is None or not rows.train:
        return Lengths()
    if parsed.trainer != "reward":
        prompts = [num_tokens(tokenizer, row["prompt"], opens_answer=True) for row in rows.train if "prompt" in row]
        prompts += [len(row["input_ids"]) for row in rows.train if "prompt" not in row and "input_ids" in row]
        return Lengths(prompt=max(prompts, default=0), num_rows=len(prompts))
    pairs = [_sides(tokenizer, row) for row in rows.train]
    limit = parsed.training_args.max_length
    num_long = sum(max(pair) > limit for pair in pairs) if limit else 0
    return Lengths(side=max(max(pair) for pair in pairs), num_long=num_long, num_rows=len(pairs))


def num_tokens(tokenizer: Any, text: Any, opens_answer: bool) -> int:
    """Tokens of a text, or of messages through the chat template.

    Args:
        tokenizer: The model's.
        text: Text or messages.
        opens_answer: True if the assistant's turn begins after the messages.

    Raises:
        ConfigError: There is no chat template, or it refuses the messages.
    """
    if isinstance(text, list):
        if not tokenizer.chat_template:
            raise ConfigError(
                "The rows hold messages, and the tokenizer has no chat template. Take an instruction-tuned model, "
                "or turn the messages into text."
            )
        from jinja2 import TemplateError

        try:
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=opens_answer)
        except TemplateError as error:
            raise ConfigError(
                f"The chat template refuses the messages: {error}. Check their roles and keys."
            ) from error
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _sides(tokenizer: Any, row: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a pair's two sides, each with its prompt."""
    if "chosen_ids" in row:
        return len(row["chosen_ids"]), len(row["rejected_ids"])
    prompt = row.get("prompt")
    texts = [row[side] if prompt is None else prompt + row[side] for side in ("chosen", "rejected")]
    chosen, rejected = (num_tokens(tokenizer, text, opens_answer=False) for text in texts)
    return chosen, rejected


def check_lengths(parsed: Parsed, lengths: Lengths | None) -> list[Finding]:
    """Compare the rows with the lengths of the recipe."""
    if lengths is None or not lengths.num_rows:
        return []
    if parsed.trainer == "reward":
        return [_check_sides(parsed.training_args, lengths)]
    limit = parsed.training_args.max_tokens_per_forward
    longest = lengths.prompt + parsed.training_args.max_completion_length
    what = f"the longest of {lengths.num_rows} prompts has {lengths.prompt} tokens"
    if limit and longest > limit:
        advice = f"Set max_tokens_per_forward to at least {longest}, or lower max_completion_length."
        return [problem("lengths", f"max_tokens_per_forward is {limit}; {what}, which makes {longest}.", advice)]
    return [ok("lengths", f"{what[0].upper()}{what[1:]}; with its completion {longest} at most.")]


def _check_sides(training_args: Any, lengths: Lengths) -> Finding:
    what = f"The longest of {2 * lengths.num_rows} sides has {lengths.side} tokens; max_length is "
    what += f"{training_args.max_length}."
    if not lengths.num_long:
        return ok("lengths", what)
    fate = "are dropped" if training_args.max_length_policy == "drop" else "lose the start of their prompt"
    advice = f"{lengths.num_long} of {lengths.num_rows} pairs {fate}: raise max_length to keep them whole."
    is_empty = lengths.num_long == lengths.num_rows and training_args.max_length_policy == "drop"
    return problem("lengths", what, advice) if is_empty else note("lengths", what, advice)


# Rules ------------------------------------------------------------------------------------------------------------


def check_rules(rewards: Sequence[Any], rows: Rows, tokenizer: Any) -> list[Finding]:
    """Call every rule set once on the rows; other rewards are named and not called."""
    found: list[Finding] = []
    for reward in rewards:
        if hasattr(reward, "rules") and hasattr(reward, "explain"):
            found += _check_set(reward, rows.train, tokenizer)
        else:
            name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
            found.append(ok("rewards", f"{name} is named; it was not called."))
    return found


def _check_set(rules: Any, rows: list[dict[str, Any]], tokenizer: Any) -> list[Finding]:
    if missing := [name for name in rules.columns if name not in rows[0]]:
        return [problem("rules", f"The data lack the column {', '.join(missing)}, which the rules read.")]
    try:
        return [*_audit(rules, rows), _score(rules, rows, tokenizer)]
    finally:
        rules.close()


def _audit(rules: Any, rows: list[dict[str, Any]]) -> list[Finding]:
    """Judge each row's gold answer and those of other rows, where a rule can say what would be right."""
    from trl_ext.rewards.auditing.audit import audit

    if not any(rule.judges_correctness for rule in rules.rules):
        return []
    try:
        report = audit(rules, rows)
    except ConfigError as error:
        return [note("rules", str(error))]  # no rule could say what would be right
    return [_audited(entry) for entry in report.rules]


def _audited(entry: Any) -> Finding:
    what = f"{entry.rule}: {entry.num_right} of {entry.num_rows} gold answers earn everything"
    what += f"; of {entry.num_compared} answers of other rows {entry.num_accepted} do." if entry.num_compared else "."
    if entry.ok:
        return ok("rules", what)
    failures = "; ".join(entry.first_failures())
    advice = f"First: {failures}. `trl-ext score audit` looks at all rows."
    is_dead = entry.num_rows > entry.num_not_asked and entry.num_right == 0
    return problem("rules", what, advice) if is_dead else note("rules", what, advice)


def _score(rules: Any, rows: list[dict[str, Any]], tokenizer: Any) -> Finding:
    """Score the rows by the whole set, with gold completions where a rule names some and else with empty ones."""
    texts = [next((text for rule in rules.rules if (text := rule.ideal(row)) is not None), None) for row in rows]
    ids = (
        None if tokenizer is None else [tokenizer(text or "", add_special_tokens=False)["input_ids"] for text in texts]
    )
    completions = [
        [{"role": "assistant", "content": text or ""}] if isinstance(row.get("prompt"), list) else text or ""
        for row, text in zip(rows, texts, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    totals = rules(prompts=[row.get("prompt") for row in rows], completions=completions, completion_ids=ids, **columns)
    known = [total for total in totals if total is not None]
    kind = "Gold" if any(texts) else "Empty"
    if not known:
        cells = {name: cells[0] for name, cells in columns.items()}
        found = rules.explain(rows[0].get("prompt"), completions[0], None if ids is None else ids[0], **cells)
        why = "; ".join(f"{part.rule} {part.status} ({part.detail})" for part in found.parts)
        return problem("rules", f"No row has a reward: {why}.")
    earned = f"{min(known):g}" if min(known) == max(known) else f"{min(known):g} to {max(known):g}"
    return ok("rules", f"{kind} completions earn {earned} on {len(known)} of {len(totals)} rows.")
