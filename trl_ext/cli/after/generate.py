"""`trl-ext generate`: completions of a run's policy for the prompts of a file.

torch is imported when the arguments are right, so that help answers at once.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trl_ext.cli.after.engines import BACKENDS, Completion, Sampling, make_engine
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

DESCRIPTION = """\
Let a trained policy answer the prompts of a file. The adapter of a LoRA run is loaded on its base model. Sampling
settings that are not given are taken from the training."""
EXAMPLES = """\
Prompts are made as in training, by the recipe's columns, system_prompt and prompt_template. If those read a single
column, a line of text or the column `prompt` may replace it. Without such keys a line of a .txt file becomes a user
message if the tokenizer has a chat template, and the column `prompt` of a .jsonl file is used as it is.

examples:
  trl-ext generate out --prompts questions.txt
  trl-ext generate out --prompts test.jsonl --num_generations 4 --output answers.jsonl --backend vllm"""


def generate(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = _parser().parse_args(list(argv))
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


def _parser() -> CommandParser:
    parser = CommandParser("trl-ext generate", description=DESCRIPTION, epilog=EXAMPLES)
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
    text = json.dumps(row, ensure_ascii=False)
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
