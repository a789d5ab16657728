"""The command of docs/reference/support.md that launches FSDP2, as printed, trains what two processes under DDP do.

On two CPUs over gloo (`fsdp_on_cpu.py`), in fp32, with transformers' own generation, whose completions differ in
length. Reward, PPO and weights in host memory: `make fsdp2`.
"""

import json
import re
import shlex

import pytest
import yaml

from tests.multi import launching
from tests.multi.launching import PROGRAMS, ROOT, YAMLS, Run, distance, loaded, run_job, succeeded
from tests.multi.warm import warm_python

PAGE = (ROOT / "docs" / "reference" / "support.md").read_text()
[PRINTED] = re.findall(r'```bash\naccelerate launch (.*"\$\(trl-ext launch-file fsdp2\)".*)\n```', PAGE)
SETTINGS = {
    "dataset_name": "rows.jsonl",
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 12,
    "beta": 0.05,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # noise in the gradient grows tenfold at most on its way to the weight
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "rules": [{"rule": "length", "high": 4, "slack": 8}],
    # One token in three or four ends the completion: each process then has another longest one.
    "generation_kwargs": {"suppress_tokens": list(range(5, 200))},
}


def run_of(launch, model, folder, settings=None, **variables) -> Run:
    """Run the printed command in a folder with its recipe, under a launch file."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": str(model), **SETTINGS, **(settings or {})})
    )
    words = [{"$(trl-ext launch-file fsdp2)": YAMLS[launch]}.get(word, word) for word in shlex.split(PRINTED)]
    command = [warm_python(), "-m", "accelerate.commands.launch", "--main_process_port", 0, *words]
    done = succeeded(command, folder, **variables)
    (folder / "log").write_text(done.stdout + done.stderr)
    return Run([], folder / "out")


def test_the_printed_command_trains_what_ddp_does(tiny_model, tmp_path):
    whole = run_of("multi_gpu", tiny_model, tmp_path / "ddp")
    facts = tmp_path / "sharded.json"
    variables = {"RUN_FIRST": str(PROGRAMS / "fsdp_on_cpu.py"), "SHARDED": str(facts)}
    sharded = run_of("fsdp2", tiny_model, tmp_path / "fsdp2", **variables)
    assert json.loads(facts.read_text())["shares"] == [0.5] * len(whole.weights)
    assert distance(whole.weights, loaded(tiny_model / "model.safetensors")) > 1e-3
    assert sharded.distance(whole) <= 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(("critic", "lora"), [("head", False), ("head", True), ("adapter", True)])
def test_a_critic_goes_on_from_its_checkpoint(critic, lora, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(launching.ENVIRONMENT, "RUN_FIRST", str(PROGRAMS / "fsdp_on_cpu.py"))
    given = dict(model=tiny_model, critics=[critic], lora=lora)

    def run(name, **options):
        return run_job("ppo", "fsdp2", tmp_path / name, **given, **options).part(critic)

    whole = run("whole", save_strategy="steps", save_steps=1)
    again = run("again", resume_from=tmp_path / "whole")
    assert again.distance(whole) == 0
    assert any(weight.any() for name, weight in whole.weights.items() if name.startswith("critic/"))
