"""A reward model of our RewardTrainer scores the same in training and wherever a completion is scored with it."""

import json
import random

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_ext
from tests import grpo_trainers, ppo_trainers, tiny
from tests.batches import difference
from tests.nightly import nightly
from tests.reward_trainers import Seen, chat_tokenizer, trainer, warnings_of
from trl_ext.errors import ConfigError, RuleError
from trl_ext.trainers.forward.reward_input import RECORD_FILE, RewardInputRecord, read_record
from trl_ext.trainers.reward.scorer import RewardModel

TOLERANCE = 1e-5
EOS = 2


def pairs(num: int, seed: int) -> list[dict[str, str]]:
    """Ragged prompts; the better answer begins with one of two words, and neither side tells where it ends."""
    draw = torch.Generator().manual_seed(seed)

    def words(least: int, most: int) -> str:
        count = int(torch.randint(least, most, (), generator=draw))
        return tiny.words(*torch.randint(20, tiny.VOCAB, (count,), generator=draw).tolist())

    return [
        {"prompt": words(1, 9) + " ", "chosen": f"w3 {words(1, 7)}", "rejected": f"w4 {words(1, 7)}"}
        for _ in range(num)
    ]


def messages(rows: list[dict[str, str]]) -> list[dict[str, list]]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return [{k: [{"role": roles[k], "content": v.strip()}] for k, v in row.items()} for row in rows]


class Trained:
    """A LoRA reward model after some steps, its folder, and its scores of held-out pairs in evaluation."""

    def __init__(self, folder, pad: str, is_chat: bool):
        ppo_trainers.actor().save_pretrained(folder / "base")
        train, held_out = pairs(64, 1), pairs(24, 2)
        if is_chat:
            train, held_out = messages(train), messages(held_out)
        tokenizer = chat_tokenizer()
        tokenizer.pad_token = pad
        model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1, dtype=torch.float32)
        settings = dict(max_steps=25, per_device_train_batch_size=16, learning_rate=2e-2, max_length=64)
        settings |= dict(peft_config=LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear"))
        settings |= dict(processing_class=tokenizer, eval_dataset=Dataset.from_list(held_out))
        subject = trainer(folder, train, model=model, **settings)
        subject.train()
        self.in_memory = subject.model
        self.folder = str(folder / "reward")
        subject.save_model(self.folder)
        self.base, self.is_chat = folder / "base", is_chat
        # [2N]: all chosen sides of a batch, then all rejected ones.
        batches = torch.as_tensor(subject.predict(subject.eval_dataset).predictions).view(-1, 2, 4)
        self.scores = torch.cat([batches[:, 0].flatten(), batches[:, 1].flatten()])
        self.prompts = [row["prompt"] for row in held_out] * 2
        self.completions = [row[side] for side in ("chosen", "rejected") for row in held_out]
        text = [c[0]["content"] if is_chat else c for c in self.completions]
        truncated = [tokenizer(t)["input_ids"] for t in text]
        self.ids = {"finished": [[*ids, EOS] for ids in truncated], "truncated": truncated}

    def model(self):
        model = AutoModelForSequenceClassification.from_pretrained(self.base, num_labels=1, dtype=torch.float32)
        return PeftModel.from_pretrained(model, self.folder).eval()

    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.folder)

    def alone(self, *, packs: bool) -> torch.Tensor:
        """By the frozen reward model itself, outside a trainer."""
        tokenizer = self.tokenizer()
        subject = RewardModel(self.model(), tokenizer, "rm", record=read_record(self.folder))
        if not packs:
            subject.packs = subject._check_is_due = False
        scores = subject(self.prompts, self.completions)
        assert subject.packs == packs
        return scores

    def through_adapter(self, ids, folder) -> torch.Tensor:
        """By PPO's actor with the reward model as one more adapter."""
        data = Dataset.from_dict({"prompt": self.prompts})
        options = dict(model=str(self.base), reward_funcs=None, reward_adapter=self.folder, response_length=16)
        subject = ppo_trainers.trainer("adapter", folder, data=data, **options)
        return subject._calculate_rewards([{}] * len(ids), self.prompts, self.completions, ids)[:, 0]

    def through_grpo(self, ids, folder) -> torch.Tensor:
        """By GRPO's reward functions."""
        # A model that was loaded has no record.
        own = {} if self.is_chat else dict(reward_model_eos="append")
        subject = grpo(folder, self.model(), self.tokenizer(), self.prompts, **own)
        scores = subject._calculate_rewards([{}] * len(ids), self.prompts, self.completions, ids)[:, 0]
        assert subject.reward_funcs[0].packs
        return scores


def grpo(folder, reward, reward_tokenizer, prompts, library=trl_ext, **changes):
    settings = dict(num_generations=2, max_completion_length=16, max_steps=1, processing_class=chat_tokenizer())
    settings |= dict(reward_processing_classes=[reward_tokenizer]) | changes
    data = Dataset.from_dict({"prompt": prompts})
    return grpo_trainers.trainer(folder, library, rewards=[reward], data=data, **settings)


KINDS = [("<pad>", False), ("<eos>", True), nightly(("<pad>", True)), nightly(("<eos>", False))]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def trained(request, tmp_path_factory):
    return Trained(tmp_path_factory.mktemp("trained"), *request.param)


def accuracy(scores: torch.Tensor) -> float:
    chosen, rejected = scores.chunk(2)
    return (chosen > rejected).float().mean().item()


@pytest.mark.parametrize("end", ["finished", "truncated"])
def test_a_score_is_the_same_in_all_trainers_whatever_ended_the_answer(end, trained, tmp_path):
    """Of the words of a truncated answer the model was never trained to score the last one."""
    ids = trained.ids[end]
    assert accuracy(trained.scores) == 1.0
    for scores in (
        trained.alone(packs=True),
        trained.alone(packs=False),
        trained.through_adapter(ids, tmp_path / "adapter"),
        trained.through_grpo(ids, tmp_path / "grpo"),
    ):
        assert difference(scores, trained.scores) < TOLERANCE
        assert accuracy(scores) == 1.0


@pytest.mark.parametrize("through", ["grpo", "ppo"])
def test_a_model_trained_in_this_process_is_read_as_in_its_training(through, trained, tmp_path):
    ids = trained.ids["truncated"]
    if through == "grpo":
        subject = grpo(tmp_path, trained.in_memory, trained.tokenizer(), trained.prompts)
    else:
        rewards = dict(reward_model=trained.in_memory, reward_processing_classes=trained.tokenizer())
        data = Dataset.from_dict({"prompt": trained.prompts})
        subject = ppo_trainers.trainer("head", tmp_path, data=data, response_length=16, reward_funcs=None, **rewards)
    scores = subject._calculate_rewards([{}] * len(ids), trained.prompts, trained.completions, ids)[:, 0]
    assert difference(scores, trained.scores) < TOLERANCE


def test_the_record_lies_beside_the_model(trained):
    record = read_record(trained.folder)
    tokenizer = trained.tokenizer()
    kind = ("conversational", None) if trained.is_chat else ("plain", True)
    assert record is not None
    assert (record.format, record.appends_eos, record.max_length) == (*kind, 64)
    assert (record.eos_token, record.pad_token) == ("<eos>", tokenizer.pad_token)


def test_a_checkpoint_holds_the_record(tmp_path):
    subject = trainer(tmp_path, pairs(8, 0), max_steps=1, save_strategy="steps", save_steps=1)
    subject.train()
    assert json.loads((tmp_path / "checkpoint-1" / RECORD_FILE).read_text())["format"] == "plain"


# Models of GRPO ------------------------------------------------------------------------------------------------------


PROMPTS = [row["prompt"] for row in pairs(4, 3)]


def test_a_module_of_the_users_own_reads_what_trl_gives_it(tmp_path):
    module = Seen()
    subject = grpo(tmp_path, module, tiny.tokenizer(), PROMPTS)
    rewards = subject._calculate_rewards([{}] * 2, ["w3 ", "w3 "], ["w7 w8", "w9"], [[7, 8, EOS], [9, EOS]])
    assert rewards.tolist() == [[3.0], [2.0]]
    assert module.inputs[0]["input_ids"].tolist() == [[3, 7, 8], [3, 9, 0]]


def test_the_record_of_a_model_given_as_a_path_is_read_and_its_metrics_keep_trls_names(tmp_path, caplog):
    ppo_trainers.classifier().save_pretrained(tmp_path / "judge")
    tiny.tokenizer().save_pretrained(tmp_path / "judge")
    RewardInputRecord("tokenized", True, "<eos>", "<pad>", None, None).write(str(tmp_path / "judge"))
    subject = grpo(tmp_path, str(tmp_path / "judge"), None, PROMPTS)
    found = subject._calculate_rewards([{}] * 2, ["w3 "] * 2, ["w7"] * 2, [[7]] * 2)
    assert difference(found[0], score_of([3, 7, EOS])) < TOLERANCE
    assert not any("Nothing records how" in warning for warning in warnings_of(caplog))
    subject.train()
    assert "rewards/judge/mean" in subject.state.log_history[0]


def score_of(ids) -> torch.Tensor:
    with torch.no_grad():
        return ppo_trainers.classifier().eval()(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("eos", "of_grpo", "of_ppo"), [("append", 3, 3), ("never", 2, 2), ("auto", 2, 3)])
def test_the_setting_reaches_the_model(eos, of_grpo, of_ppo, tmp_path):
    in_grpo = grpo(tmp_path, ppo_trainers.classifier(), tiny.tokenizer(), PROMPTS, reward_model_eos=eos)
    in_ppo = ppo_trainers.trainer("head", tmp_path, reward_model_eos=eos, **ppo_trainers.scorer(5))
    for subject, num_tokens in ((in_grpo, of_grpo), (in_ppo, of_ppo)):
        for ids in ([7, EOS], [7]):
            found = subject._calculate_rewards([{}] * 2, ["w3 "] * 2, ["w7"] * 2, [ids] * 2)[0]
            assert difference(found, score_of([3, 7, EOS][:num_tokens])) < TOLERANCE


def test_a_setting_without_effect_ends_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match="no reward model scores the completions"):
        grpo(tmp_path, ppo_trainers.reward, None, PROMPTS, reward_model_eos="never")
    with pytest.raises(ConfigError, match="no reward model scores the completions"):
        ppo_trainers.trainer("head", tmp_path, reward_model_eos="never")
    with pytest.raises(ConfigError, match="reward_model_eos='always' is unknown"):
        trl_ext.GRPOConfig(str(tmp_path), reward_model_eos="always", use_cpu=True, bf16=False)


def answers(end: str):
    """A rollout of ragged answers, all of them finished or cut off."""

    def rollout(prompts, trainer):
        draw = random.Random(0)
        ids = [[draw.randrange(20, tiny.VOCAB) for _ in range(draw.randrange(1, 12))] for _ in prompts]
        ids = [[*own, EOS] for own in ids] if end == "finished" else ids
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": ids, "logprobs": None}

    return rollout


@pytest.mark.parametrize("end", ["finished", "truncated"])
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
def test_rewards_are_those_that_trl_logs(is_chat, end, tmp_path):
    prompts = [[{"role": "user", "content": prompt.strip()}] for prompt in PROMPTS] if is_chat else PROMPTS
    own = dict(max_steps=2, rollout_func=answers(end))
    logs = []
    for library in (trl, trl_ext):
        subject = grpo(tmp_path, ppo_trainers.classifier(), chat_tokenizer(), prompts, library, **own)
        subject.train()
        logs.append([{k: v for k, v in log.items() if "reward" in k} for log in subject.state.log_history[:-1]])
        assert logs[-1][0]["reward_std"] > 100 * TOLERANCE
    for theirs, ours in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_a_chat_template_that_fails_is_said_with_the_reward_models_name(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    subject = grpo(tmp_path, ppo_trainers.classifier(), tokenizer, prompts)
    with pytest.raises(RuleError, match=r"(?s)the reward 'LlamaForSequenceClassification' raised.*no such role"):
        subject._calculate_rewards([{}], prompts[:1], [[{"role": "assistant", "content": "w7"}]], [[7]])
    judge = dict(reward_model=ppo_trainers.classifier(), reward_processing_classes=tokenizer)
    data = Dataset.from_dict({"prompt": prompts * 2})
    subject = ppo_trainers.trainer("head", tmp_path, data=data, rollout_func=two_tokens, **judge)
    with pytest.raises(RuleError, match=r"reward_model_0.*raised"):
        subject.train()


def two_tokens(prompts, trainer):
    ids = [[5, 6]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}
