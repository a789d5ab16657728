"""Data sets of the hub, in their layout on a local disk: configurations, streams, and a hub that does not answer."""

import datasets
import pytest
from datasets import Dataset
from huggingface_hub import constants

from trl_ext.errors import ConfigError, DataError
from trl_ext.scripts.data import hub
from trl_ext.scripts.data.dataset import DatasetSource

CARD = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files:\n"
    + "".join(f"  - split: {split}\n    path: {name}/{split}-*\n" for split in ("train", "test"))
    for name in ("main", "socratic")
)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """A folder as `hf download openai/gsm8k` leaves it, with rows of two configurations."""
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "README.md").write_text(CARD + "---\n")
    for config in ("main", "socratic"):
        rows = [{"question": f"w{i}", "answer": f"{config}\n#### {i}"} for i in range(3, 19)]
        for split in ("train", "test"):
            (folder / config).mkdir(exist_ok=True)
            Dataset.from_list(rows).to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_copy_of_the_hubs_folder_has_its_configurations(gsm8k, streaming):
    train, test = DatasetSource(gsm8k, test_split="test", config="socratic", streaming=streaming).load()
    assert next(iter(train)) == next(iter(test)) == {"question": "w3", "answer": "socratic\n#### 3"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "it has the configurations main, socratic. Name one, dataset_config: main."),
        ("mian", "it has no configuration 'mian', only main, socratic. Check dataset_config."),
    ],
)
def test_a_configuration_that_is_not_there_is_a_sentence(gsm8k, config, sentence):
    with pytest.raises(DataError) as caught:
        DatasetSource(gsm8k, config=config).load()
    assert str(caught.value) == f"The dataset '{gsm8k}' cannot be loaded: {sentence}"


def test_a_copy_in_one_file_stands_for_any_configuration(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w5"}\n')
    assert DatasetSource(str(tmp_path / "rows.jsonl"), config="main").load()[0][0] == {"prompt": "w5"}


def test_a_configuration_of_a_mixture_has_no_effect():
    with pytest.raises(ConfigError, match="dataset_config is 'main', which has no effect on a mixture"):
        DatasetSource(None, config="main", mixture=object())


@pytest.fixture
def no_hub(monkeypatch):
    """A hub at a port where nobody listens, and everything that would be changed put back."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_a_hub_that_does_not_answer_is_asked_once(no_hub, capfd):
    with pytest.raises(DataError) as caught:
        DatasetSource("openai/gsm8k", config="main").load()
    said = str(caught.value)
    assert "'openai/gsm8k' is not on this machine, and the hub (http://127.0.0.1:9) cannot be reached" in said
    assert "hf download openai/gsm8k --repo-type dataset --local-dir FOLDER" in said and "HF_ENDPOINT=URL" in said
    assert "\n" not in said and "Retrying" not in capfd.readouterr().err


def test_the_hub_is_left_where_it_cannot_be_reached_only(no_hub, monkeypatch):
    class Session:
        def head(self, url, timeout):
            assert url == constants.ENDPOINT

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    hub.leave_if_unreachable()
    assert not constants.HF_HUB_OFFLINE


def test_what_else_a_loader_says_is_not_about_configurations():
    assert hub.problem_of_config(ValueError("Unknown split"), None) == ""
