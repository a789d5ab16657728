"""Token ids that a reward model reads: those of its training, whoever asks it."""

import json
import random

import pytest
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from trl import RewardTrainer

from tests import grpo_trainers, tiny
from tests.reward_trainers import Seen, chat_tokenizer, warnings_of
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.reward_input import (
    RECORD_FILE,
    RewardEncoder,
    RewardInputRecord,
    check_eos_setting,
    read_record,
    training_record,
)
from trl_ext.trainers.ppo.inputs import TokenizedPrompt

PLAIN = RewardInputRecord("plain", True, "<eos>", "<pad>", None, None)


def surrounded(before: str = "", after: str = "", extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, which puts special tokens around every text, with more words at its end."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(list(extra))
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {before, after} - {""}]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, [before, "$A", after])), special_tokens=ids
    )
    return tokenizer


def characters() -> PreTrainedTokenizerFast:
    """Another tokenizer: one token per character, spaces included."""
    signs = ["<none>", "<stop>", *map(chr, range(32, 127))]
    fast = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(signs)}, unk_token="<none>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<none>", eos_token="<stop>")


def pairs(num: int = 12) -> Dataset:
    """Pairs of ragged texts; some answers end in EOS as they come."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(draw.randrange(1, most))))

    rows = [{"prompt": words(9) + " ", "chosen": words(9), "rejected": words(9) + " <eos>"} for _ in range(num)]
    return Dataset.from_list(rows)


def messages(dataset: Dataset) -> Dataset:
    """The same pairs as conversations."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return dataset.map(lambda row: {k: [{"role": roles[k], "content": v.strip()}] for k, v in row.items()})


def trained_on(dataset: Dataset, tokenizer) -> Dataset:
    """What TRL's RewardTrainer makes of the pairs."""

    class Args:
        dataset_num_proc = max_length = None

    return RewardTrainer._prepare_dataset(None, dataset, tokenizer, Args(), "train")


def encoder(tokenizer=None, record=PLAIN, **changes) -> RewardEncoder:
    return RewardEncoder(tokenizer or tiny.tokenizer(), "rm", record, **changes)


@pytest.mark.parametrize(
    "tokenizer",
    [tiny.tokenizer(), surrounded("<bos>"), surrounded("<bos>", "<pad>"), surrounded("", "<eos>")],
    ids=["bare", "bos", "both", "eos"],
)
def test_plain_text_is_encoded_as_in_training(tokenizer):
    dataset = pairs()
    trained = trained_on(dataset, tokenizer)
    for side in ("chosen", "rejected"):
        for subject in (encoder(tokenizer), encoder(tokenizer, as_grpo=True), encoder(tokenizer, None)):
            assert subject(dataset["prompt"], dataset[side]) == trained[f"{side}_ids"]


def test_conversations_are_encoded_as_in_training():
    dataset, tokenizer = messages(pairs()), chat_tokenizer()
    trained = trained_on(dataset, tokenizer)
    for side in ("chosen", "rejected"):
        for record in (PLAIN, None):
            assert encoder(tokenizer, record)(dataset["prompt"], dataset[side]) == trained[f"{side}_ids"]


@pytest.mark.parametrize("kind", ["plain", "conversational"])
def test_without_a_record_grpo_reads_what_trl_gives_a_reward_model(kind, tmp_path):
    """Through a module of the user's own, which stays TRL's."""
    tokenizer, rows = surrounded("<bos>", "<pad>"), pairs()
    tokenizer.chat_template = chat_tokenizer().chat_template
    rows = messages(rows) if kind == "conversational" else rows
    module = Seen()
    options = dict(rewards=[module], reward_processing_classes=[tokenizer], data=rows.select_columns("prompt"))
    subject = grpo_trainers.trainer(tmp_path, trl, processing_class=chat_tokenizer(), **options)
    subject._calculate_rewards([{}], rows["prompt"], rows["chosen"], [[5]] * len(rows))
    (inputs,) = module.inputs
    theirs = [ids[mask == 1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    found = encoder(tokenizer, None, as_grpo=True)(rows["prompt"], rows["chosen"])
    assert found == theirs
    assert (found == encoder(tokenizer, None)(rows["prompt"], rows["chosen"])) is (kind == "conversational")


def test_a_word_that_ends_an_answer_stays_and_no_eos_comes_twice():
    assert encoder()(["w3 "] * 2, ["w7 w9", "w7 <eos>"]) == [[3, 7, 9, 2], [3, 7, 2]]


def test_a_tokenized_prompt_has_one_bos():
    tokenizer = surrounded("<bos>")
    prompt = TokenizedPrompt("<bos> w3 ", [1, 3])
    assert encoder(tokenizer)([prompt], ["w7"]) == [[1, 3, 7, 2]]
    other = characters()
    other.add_special_tokens({"bos_token": "<start>"})
    assert encoder(tokenizer, policy_tokenizer=other)([TokenizedPrompt("<start>w3 ", [9])], ["w7"]) == [[1, 3, 7, 2]]


def test_nothing_is_one_pad_token():
    assert encoder(record=None, eos="never")([""], [""]) == [[0]]
    assert encoder()([], []) == []


# What is known of the training -----------------------------------------------------------------------------------


def test_without_a_record_eos_is_appended_and_said_once(caplog):
    subject = encoder(record=None)
    for _ in range(2):
        assert subject(["w3 "], ["w7"]) == [[3, 7, 2]]
    (warning,) = warnings_of(caplog)
    assert "Nothing records how the reward model rm was trained" in warning


def test_in_grpo_nothing_is_appended_and_said_once(caplog):
    subject = encoder(record=None, as_grpo=True)
    for _ in range(2):
        assert subject(["w3 "], ["w7"]) == [[3, 7]]
    (warning,) = warnings_of(caplog)
    assert "so text gets no EOS token, as in TRL's GRPOTrainer. Set reward_model_eos='append'" in warning


@pytest.mark.parametrize(("eos", "expected"), [("append", [1, 3, 7, 2]), ("never", [1, 3, 7])])
@pytest.mark.parametrize("as_grpo", [True, False])
def test_the_setting_decides_without_a_record_and_says_nothing(eos, expected, as_grpo, caplog):
    assert encoder(surrounded("<bos>"), None, eos=eos, as_grpo=as_grpo)(["w3 "], ["w7"]) == [expected]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("eos", ["auto", "append", "never"])
@pytest.mark.parametrize("appends", [True, False])
def test_the_record_decides_before_the_setting(eos, appends, caplog):
    record = RewardInputRecord("tokenized", appends, "<eos>", "<pad>", None, None)
    assert encoder(record=record, eos=eos)(["w3 "], ["w7"]) == [[3, 7, 2] if appends else [3, 7]]
    assert warnings_of(caplog) == []


def test_the_eos_of_the_record_is_appended():
    record = RewardInputRecord("plain", True, "<bos>", "<pad>", None, None)
    assert encoder(record=record)(["w3 "], ["w7"]) == [[3, 7, 1]]


def test_an_unknown_eos_is_refused():
    with pytest.raises(ConfigError, match=r"trained with the EOS token '<end>' .* does not know"):
        encoder(record=RewardInputRecord("plain", True, "<end>", "<pad>", None, None))


@pytest.mark.parametrize(("trained", "own"), [("<pad>", "<eos>"), ("<eos>", "<pad>"), ("<pad>", None)])
def test_another_pad_token_is_refused_where_the_score_would_be_another_tokens(trained, own):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = own
    with pytest.raises(
        ConfigError, match=rf"pad token '{trained}' .* tokenizer has '{own or '<eos>'}'.*Set tokenizer"
    ):
        encoder(tokenizer, RewardInputRecord("plain", True, "<eos>", trained, None, None))


def test_another_pad_token_that_no_text_ends_in_is_fine():
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = "<bos>"
    assert encoder(tokenizer).pad_token_id == 1


def test_another_chat_template_is_said_once(caplog):
    tokenizer = chat_tokenizer()
    record = training_record(messages(pairs()), tokenizer, None)
    prompt, completion = [{"role": "user", "content": "w3"}], [{"role": "assistant", "content": "w7"}]
    encoder(tokenizer, record)([prompt], [completion])
    assert warnings_of(caplog) == []
    tokenizer.chat_template = tokenizer.chat_template.replace("<bos>", "w9")
    subject = encoder(tokenizer, record)
    for _ in range(2):
        subject([prompt], [completion])
    (warning,) = warnings_of(caplog)
    assert "The chat template of the reward model rm differs from the template of its training" in warning


@pytest.mark.parametrize(("trained", "asked"), [("plain", "conversational"), ("conversational", "plain")])
def test_prompts_of_another_format_than_in_training_are_said_once(trained, asked, caplog):
    rows = {"plain": pairs(2), "conversational": messages(pairs(2))}
    subject = encoder(chat_tokenizer(), training_record(rows[trained], chat_tokenizer(), None))
    subject(rows[trained]["prompt"], rows[trained]["chosen"])
    assert warnings_of(caplog) == []
    for _ in range(2):
        subject(rows[asked]["prompt"], rows[asked]["chosen"])
    (warning,) = warnings_of(caplog)
    assert f"trained on {trained} data (reward_input.json), and these prompts are {asked}" in warning


def test_append_without_an_eos_token_is_refused():
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(
        ConfigError, match="reward_model_eos='append', but the tokenizer of the reward model rm has no"
    ):
        encoder(tokenizer, None, eos="append")
    assert encoder(tokenizer, None)(["w3 "], ["w7"]) == [[3, 7]]


# The record --------------------------------------------------------------------------------------------------------


def tokenized(*ends: int) -> Dataset:
    return Dataset.from_list([{"chosen_ids": [3, 7, end], "rejected_ids": [3, 8, end]} for end in ends])


@pytest.mark.parametrize(
    ("dataset", "format", "appends"),
    [
        (pairs(), "plain", True),
        (messages(pairs()), "conversational", None),
        (tokenized(2, 2), "tokenized", True),
        (tokenized(9, 9), "tokenized", False),
        (tokenized(2, 9), "tokenized", None),
        (tokenized(2, 2).rename_columns({s: s.replace("_", "_input_") for s in ("chosen_ids", "rejected_ids")}),
         "tokenized", True),
    ],
    ids=["plain", "conversational", "eos", "no eos", "mixed", "old names"],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_record_tells_how_the_data_were_made_into_ids(dataset, format, appends, is_stream, tmp_path):
    dataset = dataset.to_iterable_dataset() if is_stream else dataset
    record = training_record(dataset, chat_tokenizer(), 77)
    assert (record.format, record.appends_eos, record.eos_token, record.pad_token) == (
        format, appends, "<eos>", "<pad>",
    )  # fmt: skip
    assert (record.max_length, record.chat_template_sha256 is None) == (77, format != "conversational")
    record.write(str(tmp_path))
    assert read_record(str(tmp_path)) == record


@pytest.mark.parametrize("name", [None, "", "org/no-such-model", "/no/such/folder"])
def test_no_record_is_none(name, tmp_path):
    assert read_record(name) is None
    assert read_record(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"format": "plain"})])
def test_a_damaged_record_is_refused(text, tmp_path):
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"reward_input.json of the reward model .* cannot be read"):
        read_record(str(tmp_path))


# The setting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoders", "dataset", "reason"),
    [
        ([], None, "no reward model scores the completions"),
        ([encoder()], None, "reward_input.json records how rm was trained"),
        ([encoder(record=None)], messages(pairs()), "the prompts are conversations"),
    ],
)
def test_a_setting_without_effect_is_refused(encoders, dataset, reason):
    with pytest.raises(ConfigError, match=f"reward_model_eos='never' has no effect: {reason}"):
        check_eos_setting("never", encoders, dataset)
    check_eos_setting("auto", encoders, dataset)


@pytest.mark.parametrize("dataset", [None, pairs()])
def test_a_setting_with_effect_is_taken(dataset):
    check_eos_setting("never", [encoder(), encoder(record=None)], dataset)
