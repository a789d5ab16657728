"""Shapes: parameter counts equal the publishers', and a model is found by whatever names it."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.models import find
from trl_ext.memory.models.families import FAMILIES, shape_from_config
from trl_ext.memory.models.find import ALIASES, MODELS, TYPICAL, find_shape
from trl_ext.memory.models.shapes import (
    active_params,
    head_params,
    kv_bytes_per_token,
    lm_params,
    lora_params,
    scorer_params,
)

LLAMA3 = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hf"


def test_the_count_is_the_published_one(subtests):
    for name, (num_params, config) in MODELS.items():
        with subtests.test(name):
            assert lm_params(shape_from_config(config)) == num_params


def test_every_alias_and_typical_size_names_a_known_model_of_the_size_that_it_says():
    assert {*ALIASES.values(), *TYPICAL.values()} <= MODELS.keys()
    for size in TYPICAL:
        unit = {"M": 1e6, "B": 1e9}[size[-1]]
        assert lm_params(find_shape(size)) / unit == pytest.approx(float(size[:-1]), rel=0.25), size
    for family in FAMILIES:
        assert lm_params(shape_from_config({"model_type": family})) > 1e9, family


def test_a_size_alone_means_no_model_that_cannot_be_packed():
    assert not [size for size in TYPICAL if find_shape(size).is_eager]


def test_worked_numbers_of_llama_3_8b():
    shape = find_shape(LLAMA3)
    assert lm_params(shape) == 8_030_261_248
    assert scorer_params(shape) == 7_504_928_768
    assert lora_params(shape, 16) == 41_943_040
    assert lora_params(shape, 64) == 167_772_160
    assert kv_bytes_per_token(shape) == 131_072
    for name, kib in {"Qwen/Qwen2.5-7B": 56, "Llama-2-7b-hf": 512, "Llama-2-13b-hf": 800}.items():
        assert kv_bytes_per_token(find_shape(name)) == kib * 1024
    assert head_params(find_shape("0.5B")) == 0  # tied


def test_lora_counts_its_targets_a_mixture_its_own_experts_and_a_tuned_version_is_its_base():
    shape = find_shape(LLAMA3)
    assert lora_params(shape, 8, ("q_proj", "v_proj")) == 32 * 8 * ((4096 + 4096) + (4096 + 1024))
    with pytest.raises(ConfigError, match="gate_proj"):
        lora_params(shape, 8, ("query",))
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    assert active_params(shape) + head_params(shape) == pytest.approx(3.0e9, rel=0.05)
    for name in ("Meta-Llama-3-8B-Instruct", "me/Llama-3-8B-Instruct", LLAMA3):
        assert lm_params(find_shape(name)) == 8_030_261_248


def test_a_folder_and_its_config_are_read_and_the_local_cache_before_the_table(tmp_path, empty_cache):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert find_shape(tmp_path).num_layers == find_shape(str(tmp_path / "config.json")).num_layers == 2
    folder = empty_cache / "hub" / "models--meta-llama--Meta-Llama-3-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 5}))
    assert find_shape(LLAMA3).num_layers == 5


def test_a_model_without_a_usable_config_is_a_sentence(subtests, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for model, words in (
        (tmp_path, r"has no config\.json"),
        (tmp_path / "broken", "cannot be read as JSON"),
        (tmp_path / "list.json", r"list\.json holds no keys\. Give the config\.json"),
        ("./nowhere", "There is no nowhere"),
        ("me/unheard-of", "neither in the local cache nor .* the hub: HF_HUB_OFFLINE is set. Give"),
        ("meta-llama/Llama-3.1-9B", "Nearest: meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwn2.5-7B", "Nearest: Qwen/Qwen2.5-7B. Give"),
        ("Qwen/Qwen2.5-7B-Instuct", "Nearest: Qwen/Qwen2.5-7B-Instruct. Give"),
        ("deepseek-ai/DeepSeek-V3", r"is a 'deepseek_v3' with latent attention \(MLA\): no formula"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, r"latent attention \(MLA\)"),
        ("11B", "Sizes: 135M"),
        ({"hidden_size": 8}, "no model_type"),
        ({"model_type": "lama"}, "nearest is 'llama'"),
        ({"model_type": "rwkv5"}, "does not know"),
        ({"model_type": "llama", "hidden_size": "8"}, "hidden_size is '8'"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=words):
            find_shape(model)


def test_a_model_that_nobody_knows_is_looked_up_on_the_hub_or_a_sentence(tmp_path, monkeypatch, empty_cache):
    asked = []

    def download(name, file, etag_timeout):
        asked.append((name, file))
        (tmp_path / file).write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 3}))
        return str(tmp_path / file)

    monkeypatch.setattr(find, "no_hub", lambda: "")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_shape("me/unheard-of").num_layers == 3
    assert find_shape(LLAMA3).num_layers == 32  # of the table: nobody is asked
    assert asked == [("me/unheard-of", "config.json")]

    def download(name, file, etag_timeout):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(find, "no_hub", lambda: "")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ConfigError, match=r"from the hub: no route to host\. Nearest: meta-llama/Llama-3\.1-8B"):
        find_shape("meta-llama/Llama-3.1-9B")


@pytest.mark.parametrize(("status", "reason"), [(200, ""), (404, ""), (503, "answers 503")])
def test_a_hub_answers_unless_it_says_that_it_cannot(status, reason, monkeypatch):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as hub:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        thread = Thread(target=hub.handle_request)
        thread.start()
        said = find.no_hub()
        thread.join()
    assert said == (f"http://127.0.0.1:{hub.server_port} {reason}" if reason else "")
