"""Secrets of many kinds are planted where users put them; no file of the run, no line of its console and no payload
of a tracker holds one of them.
"""

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from transformers import TrainerCallback

from tests import recipes, tiny
from tests.chat_server import ChatServer
from tests.nightly import daily
from trl_ext.rewards import Rule, Verdict
from trl_ext.scripts import grpo, ppo, reward
from trl_ext.trainers.record import launch

SCRIPTS = {"grpo": grpo, "reward": reward, "ppo": ppo}
# By the way that each takes into a run. None looks like a token of a known service: its place has to give it away.
PLANTED = {
    "hub_token, in the recipe or by a flag": "planted01whale",
    "model_init_kwargs.token, as a mapping or as JSON": "planted02otter",
    "env: a name that says so": "planted03heron",
    "env: a password within an address": "planted04raven",
    "env: a name that says nothing": "planted05moose",
    "HF_TOKEN of the environment": "planted06gecko",
    "WANDB_API_KEY of the environment": "planted07bison",
    "a setting of a rule": "planted08finch",
    "headers of a rule": "planted09tapir",
    "run_name: a password within an address": "planted10lemur",
    "a key of any other mapping": "planted11zebra",
    "env: a token of a library": "planted12koala",
    "address: code": "planted13squid",
    "address: key": "planted14hyena",
    "address: sig": "planted15stork",
    "address: access_key": "planted16gibbon",
    "address: X-Amz-Signature": "planted17llama",
    "address: subscription-key": "planted18egret",
    "address: token": "planted19shrew",
    "address: a name that says nothing": "planted20skunk",
    "address: behind #": "planted21trout",
    "a list of addresses": "planted22quail",
    "extra_body: another provider's key": "planted23crane",
    "extra_body: deeper": "planted24bream",
    "a judge's key, which its reply quotes": "planted25panda",
    "a verifier's key, which its reply quotes": "planted27coati",
    "env: a key of a library": "planted28mole",
    "an address's secret, which the reply quotes": "planted29okapi",
    "a signing key": "planted30ibex",
    "a webhook": "planted31vole",
    "extra_body: sas_token": "planted32mink",
    "extra_body: x-auth": "planted33newt",
    "extra_body: options.key": "planted34puma",
    "extra_body: basic_auth, a list": "planted35kiwi",
    "extra_body: a list of header texts": "planted36toad",
    "address: a token in the path": "planted37carp0123456789",
    "body: auth": "planted38wasp",
}


QUERY = {"behind #": "#access_token", "a name that says nothing": "v"}
QUOTED = [secret for kind, secret in PLANTED.items() if "which" in kind]


def answer(request):
    """Reply as a judge, or as a verifier, that quotes what it was sent."""
    if "model" in request:
        return json.dumps({"reasoning": f"I was sent {QUOTED[0]}.", "score": 5})
    if "auth" in request:
        return json.dumps({"reward": 0.5, "said": f"I was sent {request['auth']}."}).encode()
    return json.dumps({"reward": 0.5, "said": f"I was sent {QUOTED[1]} at {QUOTED[2]}."}).encode()


def asking_rules(url):
    """Return rules that ask a server at this address, with secrets in all that they are given."""
    query = {kind.removeprefix("address: "): one for kind, one in PLANTED.items() if kind.startswith("address: ")}
    del query["a token in the path"]
    words = [f"{QUERY.get(name, name)}={secret}" for name, secret in query.items()]
    address = f"{url}/verify/{PLANTED['address: a token in the path']}/x?{'&'.join(words)}&quoted={QUOTED[-1]}"
    body = {"provider_key": PLANTED["extra_body: another provider's key"], "user": "plain"}
    body["provider"] = [{"credentials": {"id": PLANTED["extra_body: deeper"]}}]
    body |= {"sas_token": PLANTED["extra_body: sas_token"], "x-auth": PLANTED["extra_body: x-auth"]}
    body["options"] = {"key": PLANTED["extra_body: options.key"]}
    body["options"] |= {"basic_auth": ["ann", PLANTED["extra_body: basic_auth, a list"]]}
    body["headers"] = [f"Authorization: Basic {PLANTED['extra_body: a list of header texts']}"]
    own = f'{{"text": {{{{ completion | tojson }}}}, "auth": "Basic {PLANTED["body: auth"]}"}}'
    ask = {"api_key_env": "JUDGE_KEY", "extra_body": body, "retries": 0}
    return [
        {"rule": "judge", "model": "m", "base_url": url, **ask},
        {"rule": "remote", "url": address, "api_key_env": "VERIFIER_KEY", "retries": 0},
        {"rule": "remote", "name": "own", "url": f"{url}/own", "body": own, "retries": 0},
    ]


@dataclass(frozen=True, kw_only=True)
class Asks(Rule):
    """A rule that asks a service, as users write them."""

    api_key: str
    headers: dict[str, str]
    mirrors: list[str]
    signing_key: str
    webhook_url: str

    def score(self, row):
        return Verdict(0.5)


class Tracker(TrainerCallback):
    """Keeps what trackers are given: wandb, MLflow, TensorBoard and the like each ask the arguments in one way."""

    def __init__(self):
        self.payloads = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.payloads += [str(args.to_dict()), args.to_json_string(), str(args.to_sanitized_dict())]
        self.payloads += [repr(args), str(args)]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model, and rows that serve prompts as well as pairs."""
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    words = [(tiny.words(i), tiny.words(i + 1)) for i in range(3, 19)]
    rows = [{"prompt": f"{one} ", "chosen": one, "rejected": other, "answer": one} for one, other in words]
    recipes.write_rows(folder / "rows.jsonl", rows)
    return folder


def recipe_of(kind, url):
    """Return a short run of this trainer that saves, reports to TensorBoard and holds secrets."""
    secret = list(PLANTED.values())
    own = {
        "grpo": dict(max_steps=2, num_generations=2, max_completion_length=4, log_completions=True),
        "ppo": dict(total_episodes=8, num_mini_batches=1, num_ppo_epochs=1, response_length=4),
        "reward": dict(max_steps=2),
    }[kind]
    rule = {"rule": "answer", "gold": "answer", "kind": "exact"}
    asks = {"rule": f"{__name__}.Asks", "api_key": secret[7], "headers": {"Authorization": f"Bearer {secret[8]}"}}
    asks |= {"signing_key": secret[28], "webhook_url": f"https://hooks/{secret[29]}"}
    asks["mirrors"] = ["https://a/x", f"https://b/x?t={PLANTED['a list of addresses']}"]
    return dict(
        **({"hub_token": secret[0], "model_init_kwargs": {"token": secret[1]}} if kind == "reward" else {}),
        env={
            "EXTRA_API_KEY": secret[2],
            "DATABASE_URL": f"postgres://ann:{secret[3]}@db/runs",
            "MY_SETTING": secret[4],
            "HF_HUB_X_TOKEN": secret[11],
            "VLLM_API_KEY": secret[26],
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        },
        rules=[rule, asks, *asking_rules(url)],
        run_name=f"https://ann:{secret[9]}@tracker/runs",
        liger_kernel_config={"password": secret[10]},
        **recipes.SMALL | dict(save_strategy="steps", save_steps=1, logging_steps=1, report_to="tensorboard"),
        gradient_checkpointing=False,
        **own,
    )


def found_in(folder):
    """Return the secrets that lie in files of a folder, by file; archives and tables are looked into."""
    found = {}
    for path in (path for path in Path(folder).rglob("*") if path.is_file()):
        contents = [str(path).encode(), path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        if path.suffix == ".parquet":
            contents.append(str(parquet.read_table(path).to_pylist()).encode())
        found[path.name] = {secret for secret in PLANTED.values() for one in contents if secret.encode() in one}
    return found


@pytest.fixture
def server():
    with ChatServer(answer) as opened:
        yield opened


@pytest.mark.parametrize("kind", daily(SCRIPTS, "grpo", "reward"))
def test_no_file_line_or_payload_of_a_run_holds_a_planted_secret(kind, assets, tmp_path, capfd, monkeypatch, server):
    secret = list(PLANTED.values())
    monkeypatch.setattr("os.environ", dict(os.environ))
    os.environ |= {"HF_TOKEN": secret[5], "WANDB_API_KEY": secret[6], "TRL_EXT_REPORT": "1"}
    os.environ |= {"JUDGE_KEY": secret[24], "VERIFIER_KEY": secret[25]}
    tracker, out = Tracker(), tmp_path / "out"
    argv = recipes.recipe(tmp_path, **recipe_of(kind, server.url))
    argv += ["--model_name_or_path", str(assets / "model"), "--output_dir", str(out)]
    argv += ["--dataset_name", str(assets / "rows.jsonl")]
    if kind != "reward":
        argv += ["--hub_token", secret[0], "--model_init_kwargs", json.dumps({"token": secret[1]})]
    monkeypatch.setattr(launch, "command_line", lambda pid: ["python", "-m", f"trl_ext.scripts.{kind}", *argv])
    SCRIPTS[kind].main(argv, [tracker])

    assert os.environ["MY_SETTING"] == secret[4] and os.environ["EXTRA_API_KEY"] == secret[2]  # they are in use
    if kind != "reward":
        assert any(PLANTED["body: auth"] in str(request) for request in server.requests)  # it is sent
    files = found_in(out)
    looked_at = {"training_args.bin", "manifest.json", "recipe.yaml", "versions.json", "README.md", "report.html"}
    assert looked_at <= files.keys() and any(name.startswith("events.out") for name in files)
    assert len(list(out.rglob("training_args.bin"))) >= 3  # checkpoints' and the final one
    (left_out,) = [line for line in (out / "recipe.yaml").read_text().splitlines() if "texts for '...'" in line]
    lost = ["hub_token", "liger_kernel_config", "model_init_kwargs", "rules", "run_name"]
    assert left_out.endswith(f", of {', '.join(lost)}: entries, and texts for '...'.")
    printed = capfd.readouterr()
    files |= {
        place: {one for one in secret if one in text}
        for place, text in (("stdout", printed.out), ("stderr", printed.err), ("tracker", str(tracker.payloads)))
    }
    assert {place: secrets for place, secrets in files.items() if secrets} == {}
