"""`trl-ext evaluate`: score a run's policy on held-out problems, with the rules that it was trained with.

torch is imported when the arguments are right, so that help answers at once.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.cli.after.generate import add_engine_options, json_line, shown_progress
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError, DataError

DESCRIPTION = """\
Let a trained policy answer held-out problems, and score the answers with rules: pass@k with intervals, and the mean of
every rule. The recipe of the run makes the prompts from the rows."""
EXAMPLES = """\
A completion passes if the rule --pass_rule gives it at least --threshold. Results go to RUN/evaluations/NAME:
evaluation.json, and completions.jsonl, which `trl-ext score explain` reads.

examples:
  trl-ext evaluate out                                       the recipe's own dataset, split test, greedily
  trl-ext evaluate out --dataset gsm8k_test.jsonl --num_generations 8
  trl-ext evaluate out/checkpoint-200 --dataset openai/gsm8k --dataset_config main --limit 200 --backend vllm
  trl-ext score explain out/rules.yaml out/evaluations/NAME/completions.jsonl --row 17"""


def evaluate(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = _parser().parse_args(list(argv))
    from rich.console import Console

    from trl_ext.cli.after.engines import Sampling, make_engine
    from trl_ext.cli.after.evaluation import Evaluation, judged, pass_rule
    from trl_ext.cli.after.finished import find_run
    from trl_ext.cli.after.prompts import prompt_ids, tell_unknown
    from trl_ext.scripts.exit import refusals

    run = find_run(arguments.run)
    if run.is_reward_model:
        raise ConfigError(
            f"{run.folder} is a reward model, which solves no problems. Its accuracy on held-out pairs is in the log "
            "of a training with eval_strategy; `trl-ext report` shows it."
        )
    rules = run.load_rules(arguments.rules)
    passing = pass_rule(rules, arguments.pass_rule)
    if arguments.temperature is None and (arguments.num_generations or 1) == 1:
        arguments.temperature = 0.0
    sampling = Sampling.of(run.recipe, arguments)
    with refusals(f"The tokenizer of {run.folder} cannot be loaded"):
        tokenizer = run.load_tokenizer(arguments.trust_remote_code)
    name, problems = load_problems(run, arguments, bool(tokenizer.chat_template))
    if lacking := [column for column in rules.columns if column not in problems[0]]:
        there = ", ".join(problems[0])
        raise DataError(
            f"The rules read the column '{lacking[0]}', which {name} lacks; its columns are: {there}. Name it in the "
            "recipe's `columns`, or give other --rules."
        )
    tell_unknown(run)
    ids = prompt_ids([row["prompt"] for row in problems], tokenizer, run.recipe.get("chat_template_kwargs"))
    source = Path(name)
    parts = [] if run.folder == run.root else [run.folder.name]
    parts += [source.stem] if source.is_file() else [source.name, arguments.split]
    parts += ["greedy" if sampling.temperature == 0 else f"n{sampling.num_generations}"]
    first = Path(arguments.output or run.root / "evaluations" / "-".join(parts))
    numbered = (first.with_name(f"{first.name}-{number}") for number in range(2, 10_000))
    folder = next(one for one in (first, *numbered) if not one.exists())
    engine = make_engine(arguments.backend, run, tokenizer, arguments.batch_size, arguments.trust_remote_code)
    answers = list(shown_progress(engine(ids, sampling), len(ids)))
    rows = judged(rules, problems, answers, passing, arguments.threshold)
    rules.close()
    result = Evaluation.of(
        rows,
        rules,
        {
            "run": str(run.folder),
            "model": run.weights,
            "dataset": name,
            "split": arguments.split,
            "rules": rules.to_dict() if arguments.rules else str(run.root / "rules.yaml"),
            "pass_rule": passing,
            "threshold": arguments.threshold,
            "num_problems": len(problems),
            "num_generations": sampling.num_generations,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
            "backend": arguments.backend,
        },
    )
    folder.mkdir(parents=True)
    (folder / "completions.jsonl").write_text("".join(json_line(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "evaluation.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    console = Console()
    for part in (result.title(), result.table(), f"Results: {folder}"):
        console.print(part, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("trl-ext evaluate", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument("--dataset", metavar="DATA", help="problems: hub name, folder or file (default: the recipe's)")
    parser.add_argument(
        "--dataset_config", metavar="NAME", help="its configuration on the hub (default: the recipe's)"
    )
    parser.add_argument("--split", default="test", help="split to read, unless DATA is one file (default test)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N problems (default: all)")
    parser.add_argument("--rules", metavar="FILE", help="YAML file with rules (default: the run's rules.yaml)")
    purpose = "the rule that decides whether a completion passes (default: the first that judges correctness)"
    parser.add_argument("--pass_rule", metavar="NAME", help=purpose)
    purpose = "the least value of that rule with which a completion passes (default 1)"
    parser.add_argument("--threshold", type=float, default=1.0, help=purpose)
    purpose = "completions to sample for each problem, for pass@k (default: one greedy completion)"
    parser.add_argument("--num_generations", type=int, metavar="N", help=purpose)
    purpose = "new folder for the results (default: a new one in RUN/evaluations)"
    parser.add_argument("--output", metavar="DIR", help=purpose)
    add_engine_options(parser)
    return parser


def load_problems(run: Any, arguments: Any, has_template: bool) -> tuple[str, list[dict[str, Any]]]:
    """Read held-out rows, and make prompts from them as the run's recipe does.

    Returns:
        The dataset's name, and rows with the column `prompt`.
    """
    from trl_ext.cli.after.prompts import check_prompts, recipe_mapping
    from trl_ext.cli.score.rows import read_data
    from trl_ext.scripts.data.dataset import READERS, DatasetSource

    own = run.recipe.get("dataset_name")
    name = arguments.dataset or own
    if not name:
        raise ConfigError(f"There is no dataset: {run.root} holds no recipe with dataset_name. Give --dataset.")
    path = Path(name)
    if path.exists() or path.suffix in READERS or name.startswith(("/", "./", "../")):
        data = read_data(name, arguments.split, arguments.limit)
    else:
        config = arguments.dataset_config or (run.recipe.get("dataset_config") if name == own else None)
        try:
            data = DatasetSource(name=name, train_split=arguments.split, config=config).load()[0]
        except DataError as error:  # its advice is about a training's flags
            raise DataError(str(error).partition(" Name the splits")[0] + " Check --dataset and --split.") from error
        data = data if arguments.limit is None else data.select(range(min(arguments.limit, len(data))))
    rows = recipe_mapping(run.recipe).apply(data, name, lambda: has_template).to_list()
    check_prompts(rows, name)
    return name, rows
