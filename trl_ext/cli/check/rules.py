"""The part of `trl-ext check` about rules: what they give gold answers, those of other rows, and nothing."""

from collections.abc import Sequence
from typing import Any

from trl_ext.cli.check.data import Rows
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.errors import ConfigError


def check_rules(rewards: Sequence[Any], rows: Rows, tokenizer: Any) -> list[Finding]:
    """Call every rule set once on the rows; other rewards are named and not called."""
    found: list[Finding] = []
    for reward in rewards:
        if hasattr(reward, "rules") and hasattr(reward, "explain"):
            try:
                if missing := [name for name in reward.columns if name not in rows.train[0]]:
                    what = f"The data lack the column {', '.join(missing)}, which the rules read."
                    found.append(problem("rules", what))
                else:
                    found += [*_audit(reward, rows.train), _score(reward, rows.train, tokenizer)]
            finally:
                reward.close()
        else:
            name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
            found.append(ok("rewards", f"{name} is named; it was not called."))
    return found


def _audit(rules: Any, rows: list[dict[str, Any]]) -> list[Finding]:
    """Judge each row's gold answer and those of other rows, where a rule can say what would be right."""
    from trl_ext.rewards.auditing.audit import audit

    if not any(rule.judges_correctness for rule in rules.rules):
        return []
    try:
        report = audit(rules, rows)
    except ConfigError as error:
        return [note("rules", str(error))]  # no rule could say what would be right
    found = []
    for entry in report.rules:
        what = f"{entry.rule}: {entry.num_right} of {entry.num_rows} gold answers earn everything"
        others = f"; of {entry.num_compared} answers of other rows {entry.num_accepted} do."
        what += others if entry.num_compared else "."
        if entry.ok:
            found.append(ok("rules", what))
            continue
        advice = f"First: {'; '.join(entry.first_failures())}. `trl-ext score audit` looks at all rows."
        is_dead = entry.num_rows > entry.num_not_asked and entry.num_right == 0
        found.append((problem if is_dead else note)("rules", what, advice))
    return found


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
