"""A rule set as the reward of AsyncGRPOTrainer: it is pickled, and scores in the process that TRL spawns."""

from pathlib import Path

import pytest
import trl
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig

from tests import async_server, tiny
from tests.chat_server import ChatServer
from tests.rule_functions import mentions_exit
from trl_ext import AsyncGRPOTrainer, RuleSet
from trl_ext.rewards import Answer, Call, Code, Judge, Keywords

RIGHT = "The answer is 18.\n```python\nprint(18)\n```"
WRONG = "The answer is 17.\n```python\nimport os; os._exit(0)\n```"
TESTS = [{"input": "", "output": "18"}]


@pytest.fixture
def server(monkeypatch):
    async_server.install(monkeypatch)


@pytest.fixture
def tokenizer():
    """The tokenizer whose last two tokens are the stand-in server's completions."""
    made = tiny.tokenizer({"<pad>": 0, "<bos>": 1, "<eos>": 2, "w3": 3, RIGHT: 4, WRONG: 5})
    made.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen2_5.jinja").read_text()
    return made


def trainer_of(rules, tokenizer, folder) -> AsyncGRPOTrainer:
    tiny.model("llama").save_pretrained(folder / "tiny")
    prompt = [{"role": "user", "content": "What is 9 + 9?"}]
    rows = Dataset.from_list([{"prompt": prompt, "answer": "18", "tests": TESTS}] * 4)
    config = AsyncGRPOConfig(
        str(folder / "out"), max_steps=1, num_generations=2, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=1, **tiny.QUIET_ON_CPU,
    )  # fmt: skip
    return AsyncGRPOTrainer(str(folder / "tiny"), rules, config, rows, tokenizer)


@pytest.mark.slow
def test_a_set_scores_in_the_child_as_in_this_process(server, tokenizer, tmp_path):
    # In this process, in workers, in the sandbox of programs, by a server.
    with ChatServer(lambda request: '{"score": 8}') as judge:
        rules = RuleSet(
            [
                Answer(),
                Keywords(forbidden=["os"], weight=0.5),
                Call(mentions_exit, weight=0.25),
                Code("tests", weight=2.0),
                Judge("m", rubric="Polite.", base_url=judge.url, weight=0.1),
            ]
        )
        columns = {"answer": ["18"] * 2, "tests": [TESTS] * 2}
        alone = rules(prompts=["What is 9 + 9?"] * 2, completions=[RIGHT, WRONG], **columns)
        rules.close()
        num_asked = len(judge.requests)
        trainer = trainer_of(rules, tokenizer, tmp_path)
        seen = {}
        rewards = trainer.rollout_worker.rollout_buffer
        get = rewards.get

        def noted(*arguments, **options):
            sample = get(*arguments, **options)
            text = sample.completion[-1]["content"]
            answer = next(one for one in (RIGHT, WRONG) if text.endswith(one))  # the tiny template's words come before
            seen[answer] = (sample.metrics["rewards/rules"], sample.advantage)
            return sample

        rewards.get = noted
        trainer.train()
        assert len(judge.requests) > num_asked
    assert seen == {
        RIGHT: (pytest.approx(alone[0]), pytest.approx(1.0)),
        WRONG: (pytest.approx(alone[1]), pytest.approx(-1.0)),
    }
    assert trainer.state.log_history[0]["rewards/rules"] == pytest.approx(sum(alone) / 2)
