"""Environments behind HTTP in GRPO and PPO: packed, trained as the same game without a server, paid turn by turn."""

from typing import Any

import pytest
import torch
import trl
from transformers.utils import get_json_schema

import trl_ext
from tests import grpo_trainers, tiny, tool_task
from tests.documents import BLOCKS
from tests.environment_servers import ADD, EnvClient, Game, GymServer
from tests.nightly import daily
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer, RuleSet
from trl_ext.rewards.adapters.environments import EnvironmentReward, nemo_gym, openenv
from trl_ext.trainers.step.rows import counted_tokens

SUMS = tool_task.sums()
ROWS = SUMS.add_column("level", [int(answer) // 2 for answer in SUMS["answer"]])


class Local:
    """The game without a server, for TRL's own trainer: its turns' rewards are summed."""

    says = False
    scores = True

    def reset(self, level: int, **_: Any) -> str | None:
        self.game = Game(2 * level)
        return f" {level} + {level} =" if self.says else None

    def add(self, a: int, b: int) -> Any:
        """
        Add.

        Args:
            a: A number.
            b: A number.
        """
        if self.says and self.game.total == self.game.goal:
            return "error: the episode has ended"
        self.game.add(a, b)
        return self.game.total

    def get_reward(self) -> float:
        return self.game.earned * self.says + self.game.score() * self.scores


class Spoken(Local):
    says, scores = True, False


class Client(EnvClient):
    def reset(self, level: int) -> Any:
        result = super().reset(level)
        result.observation = f" {result.observation}"
        return result


@pytest.fixture(scope="module")
def server():
    with GymServer() as made:
        yield made


def nemo(server: GymServer, **options: Any) -> Any:
    return nemo_gym(server.url, **options)


def open_env(server: GymServer) -> Any:
    return openenv(Client, ADD, server.url, tool="add", reset_with=["level"])


SERVED = {"nemo_gym": (nemo, Local), "openenv": (open_env, Spoken)}


@pytest.mark.parametrize("made, local", SERVED.values(), ids=SERVED.keys())
def test_grpo_is_packed_and_trains_to_trls_weights_of_the_game_without_a_server(made, local, server, tmp_path):
    script = tool_task.Script(first=(*tool_task.FIRST[:3], tool_task.call("add", 4, 4) + " <eos>"))
    again = tool_task.Script(first=script.first)
    theirs = tool_task.trainer(trl, tmp_path, None, dict(environment_factory=local), script=script, rows=ROWS)
    subject = tool_task.trainer(
        trl_ext,
        tmp_path,
        EnvironmentReward(),
        dict(environment_factory=made(server)),
        script=again,
        rows=ROWS,
        packing=True,
        max_tokens_per_forward=128,
    )
    assert (tool_task.trained(subject) - tool_task.trained(theirs)).abs().max() <= 1e-6
    tool_task.check_packed(subject)
    (ours, other) = (trainer.state.log_history[0] for trainer in (subject, theirs))
    assert ours["rewards/environment/mean"] == pytest.approx(other[f"rewards/{local.__name__}/mean"], abs=1e-6) != 0
    assert not EnvClient.open, "a session was left open"


def test_the_tools_schema_is_made_of_the_servers_page(server):
    found = get_json_schema(nemo(server)().add)["function"]
    assert found["name"] == "add" and found["description"] == "Add two numbers. To the total."
    number = {"type": "integer", "description": "A number."}
    assert found["parameters"]["properties"] == {"a": number, "b": number}
    assert found["parameters"]["required"] == ["a", "b"]


def ppo(folder: Any, environment: Any, rewards: Any = None, **changes: Any) -> Any:
    model = tiny.model("llama", vocab_size=len(tool_task.WORDS))
    settings = dict(
        tiny.QUIET_ON_CPU, critic="head", save_strategy="no", logging_steps=1, max_steps=2, adam_epsilon=1e-3
    )
    settings |= dict(
        per_device_train_batch_size=8, response_length=64, learning_rate=1e-3, gradient_checkpointing=False
    )
    made = trl_ext.PPOTrainer(
        trl_ext.PPOConfig(str(folder), **settings | changes),
        tool_task.tokenizer(),
        model,
        reward_funcs=rewards or EnvironmentReward(),
        train_dataset=ROWS,
        environment_factory=environment,
    )
    first = (tool_task.call("add", 3, 4) + " <eos>", tool_task.call("add", 5, 5) + " <eos>", "9 8 7 <eos>")
    made._generate_single_turn = tool_task.Script(first=first)
    return made


@pytest.mark.parametrize("made, local", SERVED.values(), ids=SERVED.keys())
def test_ppo_packed_is_ppo_row_by_row(made, local, server, tmp_path):
    def trained(packing: bool) -> tuple[Any, torch.Tensor]:
        subject = ppo(tmp_path, made(server), packing=packing)
        before = grpo_trainers.weights(subject)
        subject.train()
        assert (grpo_trainers.weights(subject) - before).abs().max() > 1e-4
        return subject, grpo_trainers.weights(subject)

    (packed, ours), (_, rows) = trained(True), trained(False)
    assert packed._packs and (ours - rows).abs().max() <= 1e-6
    assert not EnvClient.open


def test_ppo_pays_a_turn_at_its_last_token(server, tmp_path):
    """`openenv` pays the calls, and nothing at the end; PPO's moves take the sum from the end to the turns."""
    subject = ppo(tmp_path, open_env(server), EnvironmentReward(), kl_coef=0.0)
    subject.model.train()
    output = subject._generate_and_score_completions([ROWS[i] for i in range(8)])
    mask = counted_tokens(output).bool()
    moved = subject._episodes.moved_to_turns(output)
    num_paid = 0
    for row, values in enumerate(subject._reward_calls.guarded[0].turns):
        ends = [t for t in range(mask.shape[1]) if mask[row, t] and (t + 1 == mask.shape[1] or not mask[row, t + 1])]
        assert len(ends) == len(values)
        expected = torch.zeros(mask.shape[1])
        for end, value in zip(ends, values, strict=True):
            expected[end] += value
            expected[ends[-1]] -= value
        assert torch.equal(moved[row], expected)
        ids = output["completion_ids"][row].tolist()
        differ = [tool_task.ids("3 4") == ids[t : t + 3 : 2] for t in range(len(ids))]
        assert values[0] == 0.25 * any(differ)
        num_paid += any(values)
    assert num_paid


def test_rules_are_added_and_the_reward_needs_an_environment(server, tmp_path):
    rewards = [RuleSet([Answer(gold="answer")]), EnvironmentReward()]
    subject = ppo(tmp_path, nemo(server), rewards, max_steps=1)
    subject.train()
    entry = subject.state.log_history[0]
    assert {"rewards/answer/mean", "rewards/environment/mean"} <= set(entry)
    with pytest.raises(DataError, match="environment needs the argument 'environments'"):
        grpo_trainers.trainer(tmp_path, rewards=EnvironmentReward(), rollout_func=None)


@pytest.mark.parametrize("library", daily(["grpo", "ppo"], "grpo"))
def test_a_server_that_dies_in_turn_two_costs_the_row_its_floor_and_many_end_the_run(library, tmp_path, caplog):
    turns = (tool_task.call("add", 3, 4) + " <eos>",)

    def run(answer: Any, steps: int = 1) -> dict[str, float]:
        with GymServer(answer) as server:
            made, reward = nemo_gym(server.url), EnvironmentReward(floor=-5.0)
            if library == "ppo":
                subject = ppo(tmp_path, made, reward, max_steps=steps)
            else:
                options = dict(environment_factory=made)
                subject = tool_task.trainer(
                    trl_ext, tmp_path, reward, options, rows=ROWS, packing=True, max_steps=steps
                )
            subject._generate_single_turn = tool_task.Script(first=turns, again=1.0)
            subject.train()
            return subject.state.log_history[0]

    seen: list[str] = []

    def once(path: str, number: int) -> int | None:
        seen.extend([path] * (number == 3))
        return 503 if number == 3 and len(seen) == 1 else None  # behind a seed and a first call

    whole, less = run(lambda *_: None), run(once)
    rows = round(1 / less["rules/environment/lost_frac"])
    assert "rules/environment/lost_frac" not in whole and rows in (8, 16)
    assert -6.0 < rows * (less["rewards/environment/mean"] - whole["rewards/environment/mean"]) < -5.0
    assert caplog.text.count("An environment was lost, and its row earns -5: ServerError: HTTP 503") == 1
    with pytest.raises(
        RuleError, match=r"On rank 0 the reward 'environment'.*\n.*lost their environment, more than 5%"
    ):
        run(lambda path, number: 503 if number == 3 else None, steps=8)  # the first 20 steps' share is one whole batch


def test_the_page_trains_as_printed(server, tmp_path, monkeypatch):
    """With a tiny model for the printed one, the stand-in's address, and one step."""
    (block,) = [b for b in BLOCKS if b.page == "docs/running/environments.md" and "GRPOTrainer(" in b.text]
    text = block.text.replace("http://127.0.0.1:8000", server.url).replace("max_steps=100", "max_steps=1, **few")
    model, tokenizer = tiny.model("llama", vocab_size=len(tool_task.WORDS)), tool_task.tokenizer()
    text = text.replace('"Qwen/Qwen2.5-0.5B-Instruct",', "model, processing_class=tokenizer, reward_funcs=")
    text = text.replace("    GRPOConfig(", "    args=GRPOConfig(").replace("    Dataset", "    train_dataset=Dataset")
    few = dict(tiny.QUIET_ON_CPU, num_generations=2, per_device_train_batch_size=4, save_strategy="no")
    monkeypatch.chdir(tmp_path)
    names = {"model": model, "tokenizer": tokenizer, "few": few}
    before = len(server.asked)
    exec(text, names)
    assert names["trainer"].state.global_step == 1
    assert {path for path, *_ in server.asked[before:]} >= {"/seed_session", "/verify"}
