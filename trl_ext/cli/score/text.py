"""What `trl-ext score explain` prints around the explanation."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trl_ext.rewards import AsyncRule, Explanation, Rule, RuleSet
from trl_ext.rewards.auditing.audit_report import shortened, table
from trl_ext.rewards.rules.relevance import prompt_text

_SHOWN_CHARS = 600
_ROUNDING = 1e-4  # TRL logs totals as float32


def heading(row: Mapping[str, Any], text: str) -> str:
    """The row's prompt and completion, shortened."""
    step = [f"step {row['step']}"] if row.get("step") is not None else []
    prompt = prompt_text(row.get("prompt"))
    if len(text) > _SHOWN_CHARS:  # answers stand at either end
        half = _SHOWN_CHARS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    return "\n".join([*step, f"prompt: {shortened(prompt, _SHOWN_CHARS)}", f"completion: {text}"])


def dependencies(rules: RuleSet, columns: Mapping[str, Any]) -> str:
    """A table that tells for each rule what its part of the total depends on besides the completion."""
    lines = []
    for rule in rules.rules:
        is_inline = rule.tier == "inline" or not rules.isolate
        runs = "inline" if is_inline else f"worker, {rules.limits.cpu_s:g} s at most"
        runs = f"waits, {rule.concurrency} calls at a time" if isinstance(rule, AsyncRule) else runs
        reads = [f"{name}={shortened(repr(columns.get(name)), 60)}" for name in rule.all_columns]
        reads += ["token ids"] if getattr(rule, "unit", None) == "tokens" else []
        counts = ", ".join(_conditions(rule)) or "always"
        lines.append((rule.name, ", ".join(reads) or "no column", runs, counts))
    return table([("rule", "reads", "runs", "counts"), *lines])


def _conditions(rule: Rule) -> Iterator[str]:
    if rule.gate is not None:
        yield f"where '{rule.gate}' is at least 1"
    for name, values in (rule.when or {}).items():
        yield f"where {name} is {' or '.join(map(repr, values))}"
    if rule.schedule is not None:
        yield "with a weight that changes over the run; here, that of its start"


def logged(rules: RuleSet, row: Mapping[str, Any], found: Explanation) -> str:
    """Tell what the run's own log says of this row, and whether it is the same; "" without a log."""
    if row.get("advantage") is None:
        return ""
    line = f"advantage in the log: {row['advantage']:.3f}"
    if rules.name not in row:
        return line
    total = None if row[rules.name] is None or math.isnan(row[rules.name]) else row[rules.name]
    same = total is None if found.total is None else total is not None and abs(total - found.total) < _ROUNDING
    note = "" if same else ". The log differs: the rules, the data or the progress of the run are others"
    return f"total in the log: {'none' if total is None else f'{total:.3f}'}, {line}{note}"
