"""The last lines of a run: one problem before and after training, and the next commands."""

from pathlib import Path
from typing import Any, NamedTuple

_SHOWN_CHARS = 160


def ending(folder: str | Path, kind: str) -> list[str]:
    """Return the lines; `kind` is "grpo", "ppo" or "reward"."""
    lines = []
    if found := same_problem(Path(folder)):
        for name, text in (("One problem", found.prompt), ("Before", found.before), ("After", found.after)):
            # In one line without control characters.
            line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
            half = _SHOWN_CHARS // 2
            cut = line if len(line) <= _SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}"
            lines.append(f"{name + ':':13}{cut}")
        lines.append("")
    commands = [(f"trl-ext report {folder}", "the report again, and a comparison with another run by --compare")]
    if kind != "reward":
        commands.append((f"trl-ext evaluate {folder}", "held-out problems, greedily or with pass@k"))
    commands.append(("trl-ext recipes", "recipes by task and card"))
    width = max(len(command) for command, _ in commands)
    return [*lines, "Next:", *(f"  {command:{width}}  {purpose}" for command, purpose in commands)]


class SameProblem(NamedTuple):
    """A prompt, and its answer before and after training."""

    prompt: str
    before: str
    after: str


def same_problem(folder: Path) -> SameProblem | None:
    """Return a prompt that is in a run's first and last table of completions, and its answer in each.

    Returns None if no prompt is in both, or the run wrote no tables (`log_completions`). The tables are of evaluations
    if the run began and ended with an evaluation.
    """
    import pyarrow.parquet as parquet

    paths = sorted((folder / "completions").glob("completions_*.parquet"), key=lambda path: (len(path.name), path))
    if len(paths) < 2:
        return None
    try:
        ends = [
            parquet.read_table(path, columns=["prompt", "completion"]).to_pylist() for path in (paths[0], paths[-1])
        ]
    except (OSError, ValueError):  # pyarrow's errors, for a table that a full disk truncated
        return None
    first, last = map(_first_answers, ends)
    prompt = next((prompt for prompt in reversed(first) if prompt in last), None)
    return None if prompt is None else SameProblem(prompt, first[prompt], last[prompt])


def _first_answers(table: list[dict[str, Any]]) -> dict[str, str]:
    """Return the first answer of a table to each of its prompts."""
    return {_last_content(row["prompt"]): _last_content(row["completion"]) for row in reversed(table)}


def _last_content(value: Any) -> str:
    """Return the content of the last message, or the text itself."""
    content = value[-1].get("content") if isinstance(value, list) and value else value
    return "" if content is None else str(content)
