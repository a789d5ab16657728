"""`trl-ext generate` and `trl-ext evaluate`: completions of a run's policy, for prompts or for held-out problems.

torch is imported when the arguments are right, so that help answers at once.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trl_ext.cli.after.engines import BACKENDS, Completion, Sampling, make_engine
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError, DataError

GENERATE = """\
Let a trained policy answer the prompts of a file. The adapter of a LoRA run is loaded on its base model. Sampling
settings that are not given are taken from the training."""
GENERATE_EXAMPLES = """\
Prompts are made as in training, by the recipe's columns, system_prompt and prompt_template. If those read a single
column, a line of text or the column `prompt` may replace it. Without such keys a line of a .txt file becomes a user
message if the tokenizer has a chat template, and the column `prompt` of a .jsonl file is used as it is.

examples:
  trl-ext generate out --prompts questions.txt
  trl-ext generate out --prompts test.jsonl --num_generations 4 --output answers.jsonl --backend vllm"""
EVALUATE = """\
Let a trained policy answer held-out problems, and score the answers with rules: pass@k with intervals, and the mean of
every rule. The recipe of the run makes the prompts from the rows."""
EVALUATE_EXAMPLES = """\
A completion passes if the rule --pass_rule gives it at least --threshold. Results go to RUN/evaluations/NAME:
evaluation.json, and completions.jsonl, which `trl-ext score explain` reads.

examples:
  trl-ext evaluate out                                       the recipe's own dataset, split test, greedily
  trl-ext evaluate out --dataset gsm8k_test.jsonl --num_generations 8
  trl-ext evaluate out/checkpoint-200 --dataset openai/gsm8k --dataset_config main --limit 200 --backend vllm
  trl-ext score explain out/rules.yaml out/evaluations/NAME/completions.jsonl --row 17"""


def generate(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = _generate_parser().parse_args(list(argv))
    from trl_ext.cli.after.finished import find_run
    from trl_ext.cli.after.prompts import policy_prompts, prompt_ids, read_prompts, recipe_mapping, tell_unknown
    from trl_ext.scripts.exit import refusals

    rows = read_prompts(arguments.prompts)
    if arguments.output and Path(arguments.output).exists():
        raise ConfigError(f"{arguments.output} is there already. Remove it, or give another --output.")
    run = find_run(arguments.run)
    if run.is_reward_model:
        raise ConfigError(f"{run.folder} is a reward model, which writes no text. Give the run of a policy.")
    sampling = Sampling.of(run.recipe, arguments)
    with refusals(f"The tokenizer of {run.folder} cannot be loaded"):
        tokenizer = run.load_tokenizer(arguments.trust_remote_code)
    chat = "chat" if arguments.prompts.endswith(".txt") and tokenizer.chat_template else None
    prompt_format = arguments.prompt_format or run.recipe.get("prompt_format") or chat
    mapping = recipe_mapping(run.recipe, prompt_format)
    tell_unknown(run)
    prompts = policy_prompts(rows, arguments.prompts, mapping, bool(tokenizer.chat_template))
    ids = prompt_ids(prompts, tokenizer, run.recipe.get("chat_template_kwargs"))
    engine = make_engine(arguments.backend, run, tokenizer, arguments.batch_size, arguments.trust_remote_code)
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.output, "x", encoding="utf-8") if arguments.output else nullcontext(sys.stdout) as file:
        for prompt, completions in zip(prompts, shown_progress(engine(ids, sampling), len(ids)), strict=True):
            row = {
                "prompt": prompt,
                "completions": [completion.text for completion in completions],
                "finish_reasons": [completion.finish_reason for completion in completions],
            }
            print(json_line(row), file=file, flush=True)
    return 0


def _generate_parser() -> CommandParser:
    parser = CommandParser("trl-ext generate", description=GENERATE, epilog=GENERATE_EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument(
        "--prompts", metavar="FILE", required=True, help=".txt with one prompt a line, or a data file: .jsonl, ..."
    )
    parser.add_argument("--output", metavar="FILE", help="new .jsonl file for the completions (default: print them)")
    parser.add_argument("--num_generations", type=int, metavar="N", help="completions per prompt (default 1)")
    purpose = "chat: a text prompt becomes a user message; text: it is used as it is (default: as in training)"
    parser.add_argument("--prompt_format", choices=("chat", "text"), help=purpose)
    add_engine_options(parser)
    return parser


def add_engine_options(parser: CommandParser) -> None:
    """Add the options of all commands that generate."""
    parser.add_argument(
        "--temperature", type=float, help="sampling temperature, 0 for greedy (default: as in training)"
    )
    purpose = "most tokens of a completion (default: as in training, else 256)"
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help=purpose)
    parser.add_argument("--seed", type=int, help="random seed of the sampling (default 42)")
    purpose = "library that generates; vllm is faster, and must be installed (default transformers)"
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help=purpose)
    purpose = "completions generated together by transformers; halved if memory runs out (default 32)"
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help=purpose)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the weights")


def shown_progress(found: Iterable[list[Completion]], num_prompts: int) -> Iterator[list[Completion]]:
    """Pass completions on, and print prompts and tokens done on stderr."""
    from tqdm import tqdm

    num_tokens = 0
    with tqdm(total=num_prompts, unit=" prompts", file=sys.stderr, dynamic_ncols=True) as bar:
        for completions in found:
            num_tokens += sum(len(completion.token_ids) for completion in completions)
            bar.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
            bar.update()
            yield completions


def json_line(row: Any) -> str:
    """Return a row as one line of JSON, with unprintable characters escaped."""
    text = json.dumps(row, ensure_ascii=False, default=str)  # such as a date of the data
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


# Held-out problems --------------------------------------------------------------------------------------------------


def evaluate(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = _evaluate_parser().parse_args(list(argv))
    from rich.console import Console

    from trl_ext.cli.after.evaluation import Evaluation, answered, judged, pass_rule
    from trl_ext.cli.after.finished import find_run
    from trl_ext.cli.after.prompts import prompt_ids, tell_unknown
    from trl_ext.scripts.exit import refusals
    from trl_ext.scripts.training import check_output_dir
    from trl_ext.trainers.grpo.rewards import show_prompt_end

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
    _check_columns(rules.columns, problems[0], name)
    tell_unknown(run)
    ids = prompt_ids([row["prompt"] for row in problems], tokenizer, run.recipe.get("chat_template_kwargs"))
    show_prompt_end([rules], tokenizer, run.recipe.get("chat_template_kwargs"))
    folder = _free_folder(Path(arguments.output or _results_folder(run, name, arguments.split, sampling)))
    check_output_dir(str(folder), "output")
    engine = make_engine(arguments.backend, run, tokenizer, arguments.batch_size, arguments.trust_remote_code)
    answers = list(shown_progress(engine(ids, sampling), len(ids)))
    rows = answered(problems, answers, rules.columns)
    folder.mkdir(parents=True)
    file = folder / "completions.jsonl"
    _write_lines(file, rows)  # they stay if a rule fails
    print(f"Completions: {file}", flush=True)
    rows = judged(rules, rows, passing, arguments.threshold)
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
    _write_lines(file, rows)
    (folder / "evaluation.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    console = Console()
    for part in (result.title(), result.table(), f"Results: {folder}"):
        console.print(part, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    return 0


def _write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json_line(row) + "\n" for row in rows), encoding="utf-8")


def _check_columns(needed: Sequence[str], problem: Mapping[str, Any], name: str) -> None:
    """Raise DataError if a problem of the dataset `name` lacks a column that the rules read."""
    if lacking := [column for column in needed if column not in problem]:
        raise DataError(
            f"The rules read the column '{lacking[0]}', which {name} lacks; its columns are: {', '.join(problem)}. "
            "Name it in the recipe's `columns`, or give other --rules."
        )


def _results_folder(run: Any, dataset: str, split: str, sampling: Sampling) -> Path:
    """Return the folder for the results, in the run's folder.

    Args:
        run: The finished run; the checkpoint is part of the name.
        dataset: Name or path of the problems.
        split: Split of the problems; a single file has none.
        sampling: How completions are sampled.
    """
    source = Path(dataset)
    parts = [] if run.folder == run.root else [run.folder.name]
    parts += [source.stem] if source.is_file() else [source.name, split]
    parts += ["greedy" if sampling.temperature == 0 else f"n{sampling.num_generations}"]
    return Path(run.root, "evaluations", "-".join(parts))


def _free_folder(first: Path) -> Path:
    """Return the folder, or the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    folder, number = first, 2
    while folder.exists():
        folder, number = first.with_name(f"{first.name}-{number}"), number + 1
    return folder


def _evaluate_parser() -> CommandParser:
    parser = CommandParser("trl-ext evaluate", description=EVALUATE, epilog=EVALUATE_EXAMPLES)
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
            data = DatasetSource(name=name, train_split=arguments.split, config=config).load().train
        except DataError as error:  # its advice is about a training's flags
            raise DataError(str(error).partition(" Name the splits")[0] + " Check --dataset and --split.") from error
        data = data if arguments.limit is None else data.select(range(min(arguments.limit, len(data))))
    rows = recipe_mapping(run.recipe).apply(data, name, lambda: has_template).to_list()
    check_prompts(rows, name)
    return name, rows
