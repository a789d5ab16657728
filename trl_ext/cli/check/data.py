"""The part of `trl-ext check` about data: eight rows, their columns and lengths, and the rules on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.scripts import training

NUM_ROWS = 8
ROLES = ("train_dataset", "eval_dataset")


@dataclass(frozen=True, slots=True)
class Rows:
    """The first rows of each split.

    Args:
        train: At most eight, by column.
        held_out: None if the run does not evaluate.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]] | None


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
    """Read the first rows, streamed: nothing else is read or downloaded.

    Raises:
        ConfigError, DataError: The script could not load the data; or a row cannot be read.
    """
    from datasets.exceptions import DatasetsError

    source = training.data_source(parsed.script_args, parsed.training_args, parsed.dataset_args)
    if source.mixture is not None:
        source.mixture.streaming = True
    train, held_out = replace(source, streaming=True).load()
    try:
        first = [None if split is None else list(split.take(NUM_ROWS)) for split in (train, held_out)]
        return Rows(*(_mapped(parsed, part, role) for part, role in zip(first, ROLES, strict=True)))
    except TrlExtError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"The first rows of {source.name or 'the mixture'} cannot be read: {error}.") from error


def _mapped(parsed: Parsed, rows: list[dict[str, Any]] | None, role: str) -> Any:
    """Return the rows as the recipe maps them."""
    from datasets import Dataset

    if not rows:
        return rows
    has_template = partial(training.has_chat_template, parsed.training_args, parsed.model_args)
    return list(parsed.script_args.mapping().apply(Dataset.from_list(rows), role, has_template))


def check_rows(parsed: Parsed, rows: Rows, rewards: Sequence[Any]) -> list[Finding]:
    """Check columns and sides by the trainer's own checks.

    Raises:
        DataError: The trainer would refuse the rows.
    """
    from datasets import Dataset

    from trl_ext.trainers.checks import check_dataset
    from trl_ext.trainers.rows.pairs import check_pairs

    for role, part in zip(ROLES, (rows.train, rows.held_out), strict=True):
        if part is None:
            continue
        if not part:
            raise DataError(f"{role} is empty. Check the split's name.")
        if parsed.trainer == "reward":
            check_pairs(Dataset.from_list(part), role)
        elif parsed.trainer == "grpo" or "input_ids" not in part[0]:
            check_dataset(Dataset.from_list(part), list(rewards), role)
    held_out = "" if rows.held_out is None else f" and {len(rows.held_out)} held-out ones"
    columns = ", ".join(rows.train[0])
    return [ok("data", f"{len(rows.train)} rows{held_out} read, with the columns {columns}.")]


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
