"""The part of `trl-ext check` about lengths: tokens of the first rows, and what the recipe allows."""

from dataclasses import dataclass
from typing import Any

from trl_ext.cli.check.data import Rows
from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.errors import ConfigError


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
    """Compare the rows with the lengths of the recipe.

    Raises:
        ConfigError: A forward cannot hold the longest row, as the trainer has it.
    """
    if lengths is None or not lengths.num_rows:
        return []
    if parsed.trainer == "reward":
        return [_check_sides(parsed.training_args, lengths)]
    from trl_ext.trainers.checks import check_budget

    completion, limit = parsed.training_args.max_completion_length, parsed.training_args.max_tokens_per_forward
    if limit:
        check_budget(lengths.prompt, completion, limit)
    what = f"The longest of {lengths.num_rows} prompts has {lengths.prompt} tokens"
    return [ok("lengths", f"{what}; with its completion {lengths.prompt + completion} at most.")]


def _check_sides(training_args: Any, lengths: Lengths) -> Finding:
    what = f"The longest of {2 * lengths.num_rows} sides has {lengths.side} tokens; max_length is "
    what += f"{training_args.max_length}."
    if not lengths.num_long:
        return ok("lengths", what)
    fate = "are dropped" if training_args.max_length_policy == "drop" else "lose the start of their prompt"
    advice = f"{lengths.num_long} of {lengths.num_rows} pairs {fate}: raise max_length to keep them whole."
    is_empty = lengths.num_long == lengths.num_rows and training_args.max_length_policy == "drop"
    return problem("lengths", what, advice) if is_empty else note("lengths", what, advice)
