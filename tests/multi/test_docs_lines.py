"""What the README, the pages and notebooks' text show, runs from an installed wheel, in a folder that is no checkout.

Pages that translate others, and those on clusters and on what is beside and after a run, wait for `make nightly`; the
lines of theirs that train are asked about every time.

A block of YAML whose first line is `# NAME.yaml` lies in that folder under this name.

| block | what happens to it |
|---|---|
| Python | the blocks of a page are one program, run with a tiny model for one step, the README's for all |
| shell | the commands of a page are one session, each run as printed; but |
| ... that trains | launcher and script are asked whether they take it; the first of each trainer reaches step 1 |
| ... that launches the reader's own `train.py` | it launches the README's program, on two processes |
| ... of pip or uv | its requirements are names and extras that exist |
| ... of make | the target exists |
| ... that only looks, and stands on an earlier page, too | nothing more |
| YAML | a rule set, or a recipe whose keys a script knows |
| JSON, TOML | is read |
| text, diff | nothing: output, and changes |
| marked `<!-- needs: ... -->` | nothing runs; lines that train are asked about all the same |
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests import tiny
from tests.documents import BLOCKS, NEEDS, PAGES, ROOT, Block, text_of
from tests.multi.launching import ENVIRONMENT, PROGRAMS
from tests.multi.warm import warm_python
from tests.nightly import daily
from tests.preferences import reward_model

torch.set_num_threads(1)

TIMEOUT_S = 600
TRAINS = re.compile(
    r"(?:\w+=\S+ )*(?:trl-ext |(?:accelerate launch|torchrun|python) .*-m trl_ext\.scripts\.)"
    r"(grpo|reward|ppo)\b(?! --help)"
)
OWN_PROGRAM = re.compile(r"accelerate launch .* train\.py$")
COPIES = re.compile(r"trl-ext recipes [\w-]+$")
LANGUAGES = {"", "bash", "diff", "json", "jsonl", "python", "text", "toml", "yaml"}
SAVED = re.compile(r"# (\w+\.yaml)\n")
MODEL = re.compile(r"\b(?:Qwen|meta-llama|HuggingFaceTB|mistralai)/[\w.-]+")
# Beside ours, what pip lines may install.
OTHERS = {"jupyter", "matplotlib", "torch", "wandb", "trackio", "tensorboard", "swanlab", "modelscope"}
# Commands that tell by their exit code what they found, here that this machine has no card.
MAY_FIND = ("trl-ext doctor",)
# Commands that change nothing: once is enough, however many pages show them.
LOOKS = re.compile(r"trl-ext (?:check|doctor|plan|score)\b(?!.* --(?:output|plan|write)\b)")
SETTINGS = {"use_cpu": True, "bf16": False, "max_steps": 1, "report_to": "none"}
ONE_STEP = "--use_cpu true --bf16 false --report_to none --logging_steps 1"
FEW = {
    "grpo": "--max_steps 1 --max_completion_length 4 --num_generations 2 --per_device_train_batch_size 4"
    " --gradient_accumulation_steps 1 --use_peft --lora_target_modules all-linear",
    "ppo": "--total_episodes 1 --num_ppo_epochs 1 --num_mini_batches 1 --response_length 4"
    " --per_device_train_batch_size 2 --gradient_accumulation_steps 1",
    "reward": "--max_steps 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 1",
}


def blocks(*languages: str, page: str | None = None, marked: bool | None = None) -> list[Block]:
    found = [block for block in BLOCKS if block.language in languages and page in (None, block.page)]
    return [block for block in found if marked in (None, bool(block.kind))]


def installs(line: str) -> bool:
    return line.startswith(("pip ", "uv pip ", "uv add ", "python -m pip "))


def session_of(page: str) -> list[str]:
    """The lines of a page that its test runs, without those that an earlier page's test runs."""
    found: dict[str, list[str]] = {}
    for block in blocks("", "bash", marked=False):
        seen = {line for name in found if name != block.page for line in found[name] if LOOKS.match(line)}
        lines = [" ".join(line.partition(" #")[0].split()) if LOOKS.match(line) else line for line in block.commands()]
        found.setdefault(block.page, []).extend(line for line in lines if line not in seen)
    others = (TRAINS, OWN_PROGRAM, re.compile("make "))
    return [line for line in found[page] if not (installs(line) or any(other.match(line) for other in others))]


def pages(*languages: str) -> list[str]:
    return sorted({block.page for block in blocks(*languages, marked=False)})


def cases(names: list[str]) -> list:
    """Pages as cases of a test, those that wait for the night with their marker."""
    waits = ("README_zh", "docs/zh/", "docs/cluster/", "docs/running/", "docs/oom")
    return [pytest.param(name, marks=pytest.mark.nightly) if name.startswith(waits) else name for name in names]


def training_lines() -> list[str]:
    lines = [line for block in blocks("", "bash") for line in block.commands() if TRAINS.match(line)]
    return list(dict.fromkeys(lines))  # the pages in Chinese repeat them


def trainer_of(line: str) -> str:
    return TRAINS.match(line)[1]


# An installed wheel and what a reader has in the working folder ------------------------------------------------------


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder of packages with nothing but our wheel in it."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", folder, wheel], check=True)
    return folder


@pytest.fixture(scope="module")
def environment(site, tmp_path_factory):
    """Of a shell in which Python and its programs are a warm Python that has the wheel."""
    python = warm_python(site)
    folder = tmp_path_factory.mktemp("bin")
    for program in (site / "bin" / "trl-ext", Path(sys.prefix, "bin/accelerate"), Path(sys.prefix, "bin/torchrun")):
        text = program.read_text().partition("\n")[2]
        (folder / program.name).write_text(f"#!{python}\n{text}")
        (folder / program.name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(python.parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(site), "PYTHON_EXEC": str(python), "COLUMNS": "120"}
    return {name: text for name, text in ENVIRONMENT.items() if name != "TRL_EXT_DATA"} | variables


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """A causal model and a reward model, each with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    # It knows numbers: answers of the examples must differ.
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 100)}
    words |= {str(number): 100 + number for number in range(99)}
    tokenizer = tiny.tokenizer(words)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    tiny.model("llama", max_position_embeddings=4096).save_pretrained(folder / "causal")
    reward_model(folder / "reward", max_position_embeddings=4096).save_pretrained(folder / "reward")
    for name in ("causal", "reward"):
        tokenizer.save_pretrained(folder / name)
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SUMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": f" A: {row['answer']}", "rejected": " A: 99"} for row in SUMS]
RECIPE = """\
model_name_or_path: tiny
dataset_name: train.jsonl
output_dir: out/recipe
num_generations: 4
max_completion_length: 16
use_cpu: true
bf16: false
"""
RULES = "rules:\n  - {rule: answer}\n  - {rule: length, low: 1, high: 64, unit: words, weight: 0.1, gate: answer}\n"


@pytest.fixture(scope="module")
def desk(tiny_models, tmp_path_factory):
    """The working folder of a reader: the files, data and finished runs that the pages name."""
    import datasets

    folder = tmp_path_factory.mktemp("desk")
    (folder / "tiny").symlink_to(tiny_models / "causal")
    (folder / "rules.yaml").write_text(RULES)
    (folder / "recipe.yaml").write_text(RECIPE + RULES)
    for block in blocks("yaml"):
        if named := SAVED.match(block.text):
            (folder / named[1]).write_text(block.text)
    (folder / "reward.yaml").write_text(
        re.sub("(?m)^(num_gen|max_comp).*\n", "", RECIPE).replace("train.jsonl", "pairs.jsonl")
    )
    for name in ("train.jsonl", "test.jsonl", "data.jsonl", "my/problems/train.jsonl", "my/problems/test.jsonl"):
        write_rows(folder / name, SUMS)
    pairs = "trl-lib/ultrafeedback_binarized"
    for name in ("pairs.jsonl", f"{pairs}/train.jsonl", f"{pairs}/test.jsonl"):
        write_rows(folder / name, PAIRS)
    for split in ("train", "test"):
        rows = [{"question": f"What is {row['prompt']}", "answer": f"So it is. #### {row['answer']}"} for row in SUMS]
        write_rows(folder / "openai" / "gsm8k" / f"{split}.jsonl", rows)
    said = [{**row, "completion": f"A: {row['answer']}", "completion_ids": [1, 2, 3]} for row in SUMS]
    for name in ("completions.parquet", "out/completions/completions_00010.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(said).to_parquet(folder / name)
    return folder


def furnished(folder: Path, desk: Path, tiny_models: Path) -> Path:
    """Make `folder` the reader's, in which every model of the hub is the tiny one."""
    shutil.copytree(desk, folder, symlinks=True, dirs_exist_ok=True)
    texts = [block.text for block in BLOCKS] + [path.read_text() for path in ROOT.glob("trl_ext/recipes/*.yaml")]
    for name in {name for text in texts for name in MODEL.findall(text)}:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tiny_models / "causal")
    for name in ("reward-model", "out/reward"):
        (folder / name).symlink_to(tiny_models / "reward")
    return folder


@pytest.fixture
def hub(desk, tiny_models, tmp_path):
    return furnished(tmp_path, desk, tiny_models)


def run(command: list, folder: Path, environment: dict[str, str], **options) -> str:
    """Run a command to its end; fail with the tail of what it said, or return that."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        **options,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-5000:]}"
    return done.stdout


# Blocks and what happens to them -------------------------------------------------------------------------------------


def test_every_block_has_a_language_that_is_looked_at():
    assert not [block for block in BLOCKS if block.language not in LANGUAGES]
    fences = sum(text_of(page).count("```") for page in PAGES)
    inline = sum(text_of(page).count("` ```") for page in PAGES)
    assert fences == 2 * len(BLOCKS) + inline
    # The second backslash escapes the first: the line ends there, and the next line is another command.
    assert not [block for block in BLOCKS if block.is_shell and "\\\\\n" in block.text]


def test_a_block_that_cannot_run_here_says_why():
    marked = [block for block in BLOCKS if block.kind]
    assert marked and not [block for block in marked if block.kind not in NEEDS or not block.reason]


def test_the_package_is_the_wheels(site, environment, tmp_path):
    code = "import trl_ext, os; print(trl_ext.__file__, 'trl-ext' in os.popen('trl-ext --version').read())"
    (tmp_path / "where.py").write_text(code)
    assert run(["python", "where.py"], tmp_path, environment).split() == [str(site / "trl_ext/__init__.py"), "True"]


def test_plan_check_doctor_and_a_grpo_run_need_no_extra(desk, site, environment):
    """In a Python of its own: one that is warm has imported what it is to miss."""
    command = [sys.executable, PROGRAMS / "bare.py"]
    assert run(command, desk, environment).splitlines()[-1] == "codes [0, 0, 0], []"
    assert (desk / "bare" / "model.safetensors").is_file()


class OneStep(ast.NodeTransformer):
    """Let every trainer's config in a program compute one step on a CPU."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        if name in ("GRPOConfig", "PPOConfig", "RewardConfig"):
            ours = SETTINGS | ({} if name == "RewardConfig" else {"max_completion_length": 4})
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in {*ours, "response_length"}]
            node.keywords += [ast.keyword(key, ast.Constant(value)) for key, value in ours.items()]
        return node


def program_of(page: str) -> str:
    return "\n".join(block.text for block in blocks("python", page=page, marked=False))


# One page of those that have the same program.
PROGRAMS_OF_PAGES = {program_of(page): page for page in pages("python")[::-1]}


@pytest.mark.parametrize("page", cases([page for page in PROGRAMS_OF_PAGES.values() if page != "README.md"]))
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page, hub, environment):
    program = ast.parse(program_of(page))
    (hub / "page.py").write_text(ast.unparse(OneStep().visit(program)))
    run(["python", "page.py"], hub, environment)


def test_the_readmes_program_runs_as_printed_and_ends_on_what_it_reached(hub, environment):
    """Only its model is tiny."""
    (hub / "train.py").write_text(program_of("README.md"))
    said = run(["python", "train.py"], hub, environment | {"TRL_EXT_REPORT": "1"})
    assert "step 20/20" in said and "\nReport: out/report.html" in said


def test_the_launch_line_for_a_program_of_ones_own_trains_on_two_processes(hub, environment):
    [line] = {line for block in blocks("", "bash") for line in block.commands() if OWN_PROGRAM.match(line)}
    (hub / "train.py").write_text(ast.unparse(OneStep().visit(ast.parse(program_of("README.md")))))
    run(["bash", "-c", line.replace("--num_processes 8", "--num_processes 2")], hub, environment)
    assert json.loads((hub / "out" / "versions.json").read_text())["num_processes"] == 2


@pytest.mark.parametrize("page", cases([page for page in pages("", "bash") if session_of(page)]))
def test_the_commands_of_a_page_run_in_order(page, desk, tiny_models, environment, trained, tmp_path):
    session = session_of(page)
    furnished(tmp_path, desk, tiny_models)
    (tmp_path / "elsewhere").mkdir()  # where models are themselves and not tiny
    (tmp_path / "plan").symlink_to("elsewhere/plan")
    session = [f"(cd elsewhere; {line})" if line.startswith("trl-ext plan") else line for line in session]
    for name in ("grpo", "grpo-more", "padded"):
        shutil.copytree(trained, tmp_path / "out" / name, dirs_exist_ok=True)
    script = [f"{{ {line}\n}} >said.{i} 2>&1; echo $? >code.{i}" for i, line in enumerate(session)]
    run(["bash"], tmp_path, environment, input="\n".join(script))
    failed = {}
    for i, line in enumerate(session):
        code = int((tmp_path / f"code.{i}").read_text())
        line = line.removeprefix("(cd elsewhere; ")
        if code != 0 and not (code == 1 and line.startswith(MAY_FIND)):
            failed[line] = (code, (tmp_path / f"said.{i}").read_text()[-3000:])
    assert not failed, "\n\n".join(f"{line}\nended with {code}:\n{said}" for line, (code, said) in failed.items())


def expanded(lines: list[str], folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """The words of each line, as the shell hands them to its program."""
    script = "\n".join(f"printf '%s\\0' {line}\nprintf '\\1'" for line in lines)
    told = run(["bash"], folder, environment, input=script)
    return [one.split("\0")[:-1] for one in told.split("\1")[:-1]]


def test_launcher_and_script_take_every_line_that_trains(hub, environment):
    shutil.copy(hub / "reward.yaml", hub / "recipe.yaml")  # keys that every trainer has
    copy_recipes(hub, environment)
    asked = {"lines": expanded(training_lines(), hub, environment), "recipes": []}
    told = run(["python", PROGRAMS / "accepted.py"], hub, environment, input=json.dumps(asked))
    assert json.loads(told.splitlines()[-1]) == []


def test_every_yaml_block_is_a_rule_set_or_a_recipe(hub, environment):
    asked = {"lines": [], "recipes": [block.text for block in blocks("yaml")]}
    told = run(["python", PROGRAMS / "accepted.py"], hub, environment, input=json.dumps(asked))
    assert json.loads(told.splitlines()[-1]) == []


def copy_recipes(folder: Path, environment: dict[str, str]) -> None:
    """Run the lines of the pages that copy a shipped recipe, which lines that train are then about."""
    lines = {line for block in blocks("", "bash") for line in block.commands() if COPIES.match(line)}
    run(["bash", "-e"], folder, environment, input="\n".join(sorted(lines)))


def train(trainer: str, folder: Path, environment: dict[str, str], line: str = "") -> Path:
    """Run a line, or the first of the pages that trains with this trainer, for one step; the run's folder."""
    copy_recipes(folder, environment)
    line = line or next(line for line in training_lines() if trainer_of(line) == trainer)
    line = re.sub(r"--num_processes \d+", "--num_processes 1", line)
    run(["bash", "-c", f"{line} {ONE_STEP} {FEW[trainer]} --output_dir out/{trainer}"], folder, environment)
    return folder / "out" / trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, desk, tiny_models, environment):
    """The folder of a finished run of GRPO, on data with the columns of test.jsonl."""
    folder = furnished(tmp_path_factory.mktemp("grpo"), desk, tiny_models)
    return train("grpo", folder, environment, "trl-ext grpo --config recipe.yaml")


@pytest.mark.parametrize("trainer", daily(["grpo", "reward", "ppo"], "reward", "ppo"))  # `trained` is a run of GRPO
def test_the_first_line_of_a_trainer_reaches_step_1(trainer, hub, environment):
    assert list(train(trainer, hub, environment).glob("*.safetensors"))


def test_a_line_that_installs_names_what_there_is(site):
    [ours] = distributions(path=[str(site)])
    extras = set(ours.metadata.get_all("Provides-Extra"))
    for line in (line for block in blocks("", "bash") for line in block.commands() if installs(line)):
        words = shlex.split(line, comments=True)
        for word in words[words.index("install" if "install" in words else "add") + 1 :]:
            if word.startswith("-"):
                continue
            requirement = Requirement("trl-ext" + word[1:] if word.startswith(".") else word)
            assert requirement.name in OTHERS or requirement.name.replace("_", "-") == "trl-ext", line
            assert requirement.extras <= extras, line


def test_a_target_of_make_exists():
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    lines = [line for block in blocks("", "bash") for line in block.commands() if line.startswith("make ")]
    assert lines and {shlex.split(line, comments=True)[1] for line in lines} <= targets


READERS = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "toml": tomllib.loads,
}


def test_a_block_of_data_is_read():
    assert all([READERS[block.language](block.text) for block in blocks(*READERS)])
