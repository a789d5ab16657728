"""A frozen reward model scores completions in bounded forwards as it would score each of them alone."""

import copy
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig
from trl.data_utils import apply_chat_template

from tests import tiny
from tests.batches import difference
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer, warnings_of
from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo.models import PPOModels
from trl_ext.trainers.reward.scorer import RewardModel

TOLERANCE = 5e-6


def group(seed: int, prompt: int, *completions: int) -> list[tuple[str, str]]:
    """Random words: one prompt of so many tokens, completions of so many."""
    draw = random.Random(seed)

    def words(count: int) -> str:
        return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(count)))

    start = words(prompt) + " "
    return [(start, words(count)) for count in completions]


# A group, ends that are EOS, a completion of one token, a lone row, an empty completion, group mates apart.
ROWS = [*group(1, 17, 4, 11, 1), *group(2, 5, 9, 0, 3), *group(3, 30, 13), *group(4, 1, 6, 2), *group(1, 17, 24)]
ROWS[1] = (ROWS[1][0], ROWS[1][1] + " <eos>")
ROWS[4] = (ROWS[4][0], "<eos> <eos>")
PROMPTS, COMPLETIONS = map(list, zip(*ROWS, strict=True))


ENCODER = dict(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)


@pytest.fixture
def llama(tmp_path):
    return reward_model(tmp_path / "llama")


@pytest.fixture
def counts(request):
    """Attaches to a reward model and collects the tokens of its forwards, self-check left out."""

    def attach(subject: RewardModel) -> list[int]:
        subject(["w3 "], ["w4"])
        seen: list[int] = []
        handle = subject.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        request.addfinalizer(handle.remove)
        return seen

    return attach


def scorer(model, tokenizer=None, **changes) -> RewardModel:
    """A reward model that was trained without EOS; which ids others read, test_reward_input.py says."""
    return RewardModel(model, tokenizer or tiny.tokenizer(), "tiny", eos="never", **changes)


def alone(model, texts, tokenizer=None, pad_token_id=0) -> torch.Tensor:
    """[N] scores by transformers, one text at a time; `model` must be untouched."""
    tokenizer = tokenizer or tiny.tokenizer()
    model.eval()
    model.config.pad_token_id = pad_token_id
    with torch.no_grad():
        ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        return torch.cat([model(input_ids=i).logits[:, 0] for i in ids]).float()


def texts(prompts=PROMPTS, completions=COMPLETIONS) -> list[str]:
    return [p + c for p, c in zip(prompts, completions, strict=True)]


def check_alone(model, expected=None, tokenizer=None, given=(PROMPTS, COMPLETIONS), **changes) -> RewardModel:
    """Fail unless the reward model scores rows as transformers scores their texts alone."""
    expected = alone(copy.deepcopy(model), texts()) if expected is None else expected
    subject = scorer(model, tokenizer, **changes)
    assert difference(subject(*given), expected) < TOLERANCE
    return subject


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        *((family, 60) for family in (*tiny.PACKABLE, *tiny.MIXTURE, "qwen3_5")),
        *(("llama", n) for n in (None, 200, 20)),
    ],
)
def test_a_packed_score_is_the_score_of_the_text_alone(tmp_path, family, budget):
    assert check_alone(reward_model(tmp_path, family), max_tokens_per_forward=budget).packs


def test_scores_agree_where_the_pad_token_is_eos(llama):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    expected = alone(copy.deepcopy(llama), texts(), pad_token_id=tokenizer.eos_token_id)
    check_alone(llama, expected, tokenizer, max_tokens_per_forward=60)
    assert llama.config.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token is None


@pytest.mark.parametrize("packs", [True, False])
def test_a_reward_model_in_bfloat16_gives_float32_scores_close_to_those_alone(llama, packs):
    model = llama.to(torch.bfloat16)
    expected = alone(copy.deepcopy(model), texts())
    subject = scorer(model, max_tokens_per_forward=60)
    if not packs:
        pad_only(subject)
    scores = subject(PROMPTS, COMPLETIONS)
    assert scores.dtype == torch.float32
    assert subject.packs == packs
    # Eight bits of mantissa; the scores spread over about 0.5.
    assert difference(scores, expected) < 0.02


def test_autocast_surrounds_every_forward(llama):
    expected = alone(copy.deepcopy(llama), texts())
    subject = scorer(llama, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    error = difference(subject(PROMPTS, COMPLETIONS), expected)
    assert 1e-5 < error < 0.02
    assert subject.packs


def pad_only(subject: RewardModel) -> None:
    """As if the self-check had failed."""
    subject.packs = subject._check_is_due = False


def test_a_prompt_is_forwarded_once_for_its_completions(llama, counts):
    subject = scorer(llama)
    seen = counts(subject)
    prompts, completions = zip(*group(5, 40, 3, 4, 5), strict=True)
    subject(prompts, completions)
    assert seen == [40 + 3 + 4 + 5]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("budget", [25, 60, 200])
def test_a_forward_exceeds_the_budget_only_with_one_sequence_that_does(llama, counts, budget, packs):
    subject = scorer(llama, max_tokens_per_forward=budget)
    if not packs:
        pad_only(subject)
    seen = counts(subject)
    subject(PROMPTS, COMPLETIONS)
    longer = sorted(n for n in (len(text.split()) for text in texts()) if n > budget)
    assert sorted(n for n in seen if n > budget) == longer
    assert len(seen) > 1 or budget == 200


def test_rows_that_are_not_kept_are_nan_and_cost_nothing(llama, counts):
    expected = alone(copy.deepcopy(llama), texts())
    subject = scorer(llama)
    seen = counts(subject)
    keep = [i in (0, 6) for i in range(len(PROMPTS))]
    scores = subject(PROMPTS, COMPLETIONS, keep=torch.tensor(keep))
    assert scores.isnan().tolist() == [not k for k in keep]
    assert difference(scores[[0, 6]], expected[[0, 6]]) < TOLERANCE
    assert sum(seen) == sum(len(text.split()) for text, k in zip(texts(), keep, strict=True) if k)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "jamba"])
def test_a_family_that_cannot_be_packed_is_padded_and_says_why(tmp_path, caplog, family):
    assert not check_alone(reward_model(tmp_path, family), max_tokens_per_forward=60).packs
    (warning,) = warnings_of(caplog)
    assert "The reward model tiny scores padded batches, without packing: " in warning


def test_an_encoder_is_padded_and_says_why(caplog):
    torch.manual_seed(0)
    config = BertConfig(**ENCODER, num_labels=1)
    check_alone(AutoModelForSequenceClassification.from_config(config), max_tokens_per_forward=60)
    assert "no layer `score` on top of a backbone, so single tokens cannot be scored." in warnings_of(caplog)[0]


def test_several_labels_and_a_tokenizer_without_what_is_needed_are_refused(llama):
    prompt, completion = conversation("w3", "w4")
    with pytest.raises(ConfigError, match="tokenizer of the reward model tiny has no chat template"):
        scorer(llama)([prompt], [completion])
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad nor an EOS token"):
        scorer(llama, tokenizer)
    llama.config.num_labels = 3
    with pytest.raises(ConfigError, match="A reward model has one label; tiny has 3"):
        scorer(llama)


def test_the_model_is_frozen_and_stays_in_evaluation_mode(tmp_path):
    model = reward_model(tmp_path, attention_dropout=0.5)
    expected = alone(copy.deepcopy(model), texts())
    subject = scorer(model)
    assert not any(p.requires_grad for p in model.parameters())
    model.train()  # as a trainer does with whatever it prepares
    assert difference(subject(PROMPTS, COMPLETIONS), expected) < TOLERANCE


def test_text_goes_through_the_reward_models_own_tokenizer(llama):
    other = tiny.tokenizer()
    other.add_tokens(["w3 w4"])  # one token more, and w3 w4 is one token
    llama.resize_token_embeddings(len(other))
    expected = alone(copy.deepcopy(llama), ["w3 w4 w5"], other)
    assert difference(alone(copy.deepcopy(llama), ["w3 w4 w5"]), expected) > 1e-3
    check_alone(llama, expected, other, (["w3 "], ["w4 w5"]))


def conversation(prompt: str, completion: str):
    return [{"role": "user", "content": prompt.strip()}], [{"role": "assistant", "content": completion}]


def test_conversations_are_written_by_the_reward_models_chat_template(llama):
    prompts, completions = map(list, zip(*(conversation(*row) for row in ROWS), strict=True))
    tokenizer = chat_tokenizer()
    messages = [{"messages": p + c} for p, c in zip(prompts, completions, strict=True)]
    written = [apply_chat_template(m, tokenizer)["text"] for m in messages]
    check_alone(llama, alone(copy.deepcopy(llama), written), tokenizer, (prompts, completions))
    # Settings reach the template.
    tokenizer.chat_template = "{% if brief %}w7 w8{% else %}w9{% endif %}"
    prompt, completion = conversation("w3", "w4")
    expected = alone(copy.deepcopy(llama), ["w7 w8"])
    check_alone(llama, expected, tokenizer, ([prompt], [completion]), chat_template_kwargs={"brief": True})


def test_odd_texts_are_scored_and_no_completion_gives_no_score(llama):
    expected = alone(copy.deepcopy(llama), ["<pad>", "w3 w4"])
    subject = check_alone(llama, expected, given=(["", "w3 "], ["", "w4"]))
    pad_only(subject)
    assert difference(subject(["", "w3 "], ["", "w4"]), expected) < TOLERANCE
    assert subject(["w3 "], ["\ud800 w4"]).isfinite().all()
    assert subject([], []).shape == (0,)


def test_a_sequence_beyond_the_positions_loses_its_first_tokens_and_is_warned_of_once(tmp_path, caplog):
    model = reward_model(tmp_path, max_position_embeddings=24)
    expected = alone(copy.deepcopy(model), [" ".join(text.split()[-24:]) for text in texts()])
    logging.Logger.warning_once.cache_clear()
    subject = check_alone(model, expected, max_tokens_per_forward=60)
    subject(PROMPTS, COMPLETIONS)
    (warning,) = warnings_of(caplog)
    assert "Sequences longer than the 24 positions of the reward model tiny lose their first tokens" in warning


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("keep", [None, [False] * len(PROMPTS)])
def test_ranks_agree_once_a_call_and_make_as_many_forwards(llama, counts, keep, packs):
    asked: list[int] = []
    subject = scorer(llama, max_tokens_per_forward=60, agree=lambda own: asked.append(own) or own + 2)
    if not packs:
        pad_only(subject)
    seen = counts(subject)
    asked.clear()
    seen_before = subject(PROMPTS, COMPLETIONS, keep)
    assert len(asked) == 1
    assert len(seen) == asked[0] + 2
    assert seen[-2:] == [2, 2]
    assert (asked[0] == 0) == (keep is not None)
    assert seen_before.isnan().all() == (keep is not None)


def test_a_reward_model_with_lora_is_packed(llama):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
    assert check_alone(get_peft_model(llama, lora), max_tokens_per_forward=60).packs


def test_a_reward_model_whose_rows_processes_cannot_share_is_refused(llama):
    models = PPOModels.__new__(PPOModels)
    models._trainer, models._args = SimpleNamespace(sequence_group=None), SimpleNamespace(sequence_parallel=3)
    models.rewards = [scorer(llama)]
    llama.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match=r"has positions of type dynamic.* Leave sequence_parallel=3 out"):
        models.prepare_rewards()
