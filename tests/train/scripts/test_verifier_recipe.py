"""The recipe math-grpo-judge-1xa100-80: rules first, and a verifier behind HTTP for what they cannot decide."""

import re
import string

import pytest

from tests import recipes, tiny
from tests.chat_server import ChatServer, shown
from tests.reward_trainers import CHAT_TEMPLATE
from trl_ext import RuleSet, resources
from trl_ext.monitor.record import read_log_history
from trl_ext.scripts import grpo

NAME = "math-grpo-judge-1xa100-80"
OPEN = "the set of all even integers"  # a gold that Math cannot compare
SMALL = (
    "--use_cpu true --bf16 false --gradient_checkpointing false --dtype float32 --max_steps 2 --num_generations 4"
    " --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --max_completion_length 1 --save_strategy no"
)


def verifier(request):
    """Right is what has the right answer's last word."""
    word = re.search(r"(\w+)\n</right-answer-", shown(request))[1]
    answer = re.search(r"<answer-\w+>\n(.*)\n</answer-", shown(request), re.DOTALL)[1]
    return "A" if word in answer else "B"


@pytest.fixture
def served():
    with ChatServer(verifier) as server:
        yield server


@pytest.fixture
def config(served, tmp_path):
    """The recipe as it is shipped, but for the server's port."""
    text = resources.recipe(NAME).read_text()
    assert "http://127.0.0.1:8000/v1" in text and "--port 8000" in text
    (tmp_path / "recipe.yaml").write_text(text.replace("http://127.0.0.1:8000/v1", served.url))
    return tmp_path / "recipe.yaml"


def test_the_verifier_is_asked_about_undecided_answers_alone(served, config):
    settings = grpo.make_parser().parse(["--config", str(config), "--bf16", "false"])[0]
    rules = RuleSet.from_dict({"rules": settings.rules})
    told = rules.explain_all(
        ["Which?"] * 5,
        [r"\boxed{2}", r"\boxed{3}", r"\boxed{all even integers}", r"\boxed{all primes}", "I do not know."],
        answer=["2", "2", OPEN, OPEN, OPEN],
    )
    rules.close()
    assert [one.total for one in told] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [one.parts[1].status for one in told] == ["gated", "gated", "ok", "ok", "gated"]
    for request in served.requests:
        assert (request["model"], request["max_completion_tokens"]) == ("opencompass/CompassVerifier-3B", 8)
        assert "Reply with one letter" in request["messages"][0]["content"] and OPEN in shown(request)
    assert len(served.requests) == 2


def test_the_recipe_trains_and_tells_how_often_the_verifier_was_asked(served, config, tmp_path):
    known = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "w3": 3, r"\boxed{2}": 4}
    said = [rf"\boxed{{{letter}\text{{ integers}}}}" for letter in string.ascii_letters]
    tokenizer = tiny.tokenizer(known | {word: number for number, word in enumerate(said, 5)})
    tokenizer.chat_template = CHAT_TEMPLATE
    recipes.save(tmp_path / "policy", tokenizer=tokenizer)
    rows = [{"question": f"Question {n}?", "final_answer": OPEN if n % 2 else "2"} for n in range(16)]
    recipes.write_rows(tmp_path / "data", rows)
    where = {"model_name_or_path": "policy", "dataset_name": "data", "output_dir": "out"}
    words = [word for key, name in where.items() for word in (f"--{key}", str(tmp_path / name))]
    grpo.main(["--config", str(config), *words, *SMALL.split()])
    logs = [log for log in read_log_history(tmp_path / "out") if "reward" in log]
    assert len(logs) == 2 and served.requests
    for log in logs:
        assert log["rules/verifier/calls"] <= 16 * (1 - log["rules/verifier/gated_frac"])
        assert log["rules/math/undecided_frac"] == pytest.approx(1 - log["rules/verifier/gated_frac"])
