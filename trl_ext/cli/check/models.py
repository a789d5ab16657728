"""The part of `trl-ext check` about models and rules: build rewards, load the tokenizer, read the model's shape.

Also scores gold answers, answers of other rows, and empty answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.cli.check.data import Rows
from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.examine import check_sandbox
from trl_ext.doctor.facts import Facts
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.doctor.look import look_at_sandbox
from trl_ext.errors import ConfigError
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.rewards.base.rows import TRL_EXTRAS, as_columns
from trl_ext.rewards.rules.code import Code
from trl_ext.scripts import training
from trl_ext.scripts.data.dataset import unloadable
from trl_ext.scripts.grpo import all_rewards
from trl_ext.scripts.rewards import build_rewards, build_rules
from trl_ext.trainers.grpo.rewards import show_prompt_end

_NOT_GIVEN = ("prompt", "prompts", "completion", "completions", "completion_ids")


def rewards_of(parsed: Parsed) -> list[Any]:
    """Build the run's rewards, with the script's checks and errors in its order."""
    script_args, training_args = parsed.script_args, parsed.training_args
    if parsed.trainer == "ppo":
        from trl_ext.scripts import ppo

        ppo.take_old_paths(script_args, training_args, parsed.model_args)
        ppo.check_paths(script_args, parsed.model_args)
        models = ppo.reward_models(script_args)
        rewards = build_rewards(script_args.rules, script_args.reward_funcs, *models)
        ppo.settle_critic(script_args, training_args, parsed.model_args, rewards)
    else:
        training.check_model(parsed.model_args)
    training.resume_point(training_args)
    if parsed.trainer == "grpo":
        return all_rewards(script_args)
    if parsed.trainer == "reward":
        return [] if script_args.rules is None else [build_rules(script_args.rules)]
    return rewards


def load_tokenizer(parsed: Parsed) -> Any:
    """Load the model's tokenizer; raise ConfigError if it cannot be loaded."""
    training.check_model(parsed.model_args)
    return training.load_tokenizer(parsed.training_args, parsed.model_args)


def describe_tokenizer(tokenizer: Any) -> Finding:
    """Report a tokenizer's size, template and special tokens; a note if it has no EOS token."""
    template = "with a chat template" if tokenizer.chat_template else "without a chat template"
    what = f"{len(tokenizer):,} tokens, {template}, EOS {tokenizer.eos_token!r}, padding {tokenizer.pad_token!r}."
    if tokenizer.eos_token is None:
        advice = "Without an EOS token every completion runs to its full length: choose a tokenizer with an EOS token."
        return note("tokenizer", what, advice)
    return ok("tokenizer", what)


def shape_of(parsed: Parsed) -> ModelShape:
    """Return the model's shape; raise ConfigError if there is no config, or its family is unknown."""
    training.check_model(parsed.model_args)
    name = str(parsed.model_args.model_name_or_path)
    try:
        return find_shape(Path(name).resolve() if Path(name).is_dir() else name)  # a folder called 8B is a folder
    except ConfigError:
        if Path(name).exists():
            raise
    from transformers import AutoConfig

    try:
        trusts = bool(getattr(parsed.training_args, "trust_remote_code", False))
        config = AutoConfig.from_pretrained(name, revision=parsed.model_args.model_revision, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config of {unloadable(name, error)}") from error
    return find_shape(config.to_dict())


def check_scorers(parsed: Parsed, tokenizer: Any) -> None:
    """Raise ConfigError, as PPOTrainer does, for a value model or reward model that has no use for its token ids."""
    from trl_ext.trainers.forward.reward_input import check_vocabulary
    from trl_ext.trainers.ppo.inputs import check_value_model, tokenizer_in
    from trl_ext.trainers.rows.prompts import config_of

    given, args = parsed.script_args, parsed.training_args
    for name in given.reward_model or ():
        if config := config_of(name, args):
            check_vocabulary(tokenizer_in(name, tokenizer), config, Path(name).name)
    actor = config_of(str(parsed.model_args.model_name_or_path), args)
    if given.value_model and actor and (config := config_of(given.value_model, args)):
        check_value_model(config, actor, tokenizer)


def check_rules(parsed: Parsed, rewards: Sequence[Any], rows: Rows, tokenizer: Any) -> list[Finding]:
    """Call every rule set once on the rows; other rewards are listed and not called.

    Args:
        parsed: The recipe and its overrides.
        rewards: Rule sets and reward functions of the recipe.
        rows: The rows that were read.
        tokenizer: The model's.
    """
    show_prompt_end(rewards, tokenizer, getattr(parsed.training_args, "chat_template_kwargs", None))
    found: list[Finding] = []
    for reward in rewards:
        if hasattr(reward, "rules") and hasattr(reward, "explain"):
            if any(isinstance(rule, Code) for rule in reward.rules):
                found += check_sandbox(Facts(sandbox=look_at_sandbox()))
            try:
                if missing := [name for name in reward.columns if name not in rows.train[0]]:
                    what = f"The data lack the column {', '.join(missing)}, which the rules read."
                    found.append(problem("rules", what))
                elif set(reward.columns) <= set(_columns_of(rows.train)):  # else the check of the data has refused it
                    found += [*_audit(reward, rows.train), _score(reward, rows.train, tokenizer)]
            finally:
                reward.close()
        else:
            name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
            found.append(ok("rewards", f"{name} can be loaded; it was not called."))
    return found


def _columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the columns that TRL gives to reward functions."""
    return [name for name in rows[0] if name not in {*_NOT_GIVEN, *TRL_EXTRAS}]


def _audit(rules: Any, rows: list[dict[str, Any]]) -> list[Finding]:
    """Judge gold answers of each row and of other rows, if a rule can give the right answer."""
    from trl_ext.rewards.auditing.audit import audit

    if not any(rule.judges_correctness for rule in rules.rules):
        return []
    try:
        report = audit(rules, rows)
    except ConfigError as error:
        return [note("rules", str(error))]  # no rule could give a right answer
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
    """Score the rows with all rules, on gold completions if a rule can make them, else on empty completions."""
    answers = [_ideal_answer(rules, row) for row in rows]
    completions = [_as_completion(row, answer) for row, answer in zip(rows, answers, strict=True)]
    ids = None
    if tokenizer is not None:
        ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    columns = as_columns(rows, _columns_of(rows))
    totals = rules(prompts=[row.get("prompt") for row in rows], completions=completions, completion_ids=ids, **columns)
    known = [total for total in totals if total is not None]
    if not known:
        cells = {name: cells[0] for name, cells in columns.items()}
        found = rules.explain(rows[0].get("prompt"), completions[0], None if ids is None else ids[0], **cells)
        why = "; ".join(f"{part.rule} {part.status} ({part.detail})" for part in found.parts)
        return problem("rules", f"No row has a reward: {why}.")
    kind = "Gold" if any(answers) else "Empty"
    earned = f"{min(known):g}" if min(known) == max(known) else f"{min(known):g} to {max(known):g}"
    return ok("rules", f"{kind} completions earn {earned} on {len(known)} of {len(totals)} rows.")


def _ideal_answer(rules: Any, row: dict[str, Any]) -> str:
    """Return the right answer to a row, of the first rule that can make it; "" if none can."""
    for rule in rules.rules:
        text: str | None = rule.ideal(row)
        if text is not None:
            return text
    return ""


def _as_completion(row: dict[str, Any], answer: str) -> Any:
    """Return an answer in the form of the row's prompt: as a message, or as text."""
    return [{"role": "assistant", "content": answer}] if isinstance(row.get("prompt"), list) else answer
