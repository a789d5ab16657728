"""The seam table: it holds what we hold on to in other projects, and that is where we think it is."""

import ast
import inspect
import os
import re
import sys
import textwrap
from importlib import import_module
from types import ModuleType

import pytest
import torch
from transformers import TrainerCallback

import trl_ext
from tests.conftest import ROOT
from trl_ext import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl_ext.compat import torch as compat_torch
from trl_ext.compat import versions
from trl_ext.compat.seams import SEAMS, Seam, resolve, set_in_methods
from trl_ext.compat.trl import head_in_cache
from trl_ext.doctor.installed import untested_findings
from trl_ext.errors import ConfigError, SupportError

PACKAGE = ROOT / "trl_ext"
ROOMS = [path for room in ("compat", "launch", "trainers") for path in sorted((PACKAGE / room).rglob("*.py"))]
TRAINERS = (GRPOTrainer, RewardTrainer)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.where}{list(seam.keys) or ''}")
def test_seam_is_as_we_count_on(seam):
    if seam.package == "deepspeed":
        pytest.importorskip("deepspeed")
    assert seam.problem == ""


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (("GRPOTrainer._generate_all",), "is not there"),
        (("GRPOTrainer._generate", ("inputs",)), "lacks the parameters inputs"),
        (("GRPOTrainer.log", ("start_time", "logs")), "has its parameters in another order: self, logs, start_time"),
        (("GRPOTrainer._generate_and_score_completions", (), ("prompt_ids", "ids")), "lacks the keys ids"),
        (("GRPOTrainer._step_of_old",), "is not there"),
    ],
)
def test_a_seam_that_has_changed_is_named_with_how(seam, problem):
    where, parameters, keys = (*seam, (), ())[:3]
    assert Seam(f"trl.trainer.grpo_trainer:{where}", parameters, keys, "").problem.startswith(problem)


# What the table must hold -------------------------------------------------------------------------------------------


def of_others(kind):
    """The classes of TRL and transformers that a class of ours inherits, but callbacks, whose hooks are documented."""
    bases = (base for base in kind.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers"))
    return [base for base in bases if not issubclass(base, TrainerCallback)]


def subclasses():
    """Every class of the package that inherits one of TRL's or transformers' and has no subclass in it."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))]
    modules = [name for name in modules if name.split(".")[1] in ("compat", "trainers", "scripts", "monitor")]
    members = (member for name in modules for member in vars(import_module(name.removesuffix(".__init__"))).values())
    found = {member for member in members if inspect.isclass(member) and member.__module__.startswith("trl_ext.")}
    leaves = {kind for kind in found if of_others(kind) and not (set(kind.__subclasses__()) & found)}
    return sorted(leaves, key=lambda kind: kind.__name__)


def overrides_without_row(kind):
    """Methods and private names of a subclass and its mixins that another project defines and the table lacks."""
    others = of_others(kind)
    inherited = {name for other in others for name in vars(other)}
    own = {
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] in ("trl_ext", __name__.partition(".")[0])
        for name, member in vars(base).items()
        if name.startswith("_") or inspect.isroutine(member) or isinstance(member, property)
    }
    python = {name for name in own if name[:2] == "__" and name not in ("__init__", "__post_init__")}
    made = {"__init__"} if hasattr(kind, "__dataclass_fields__") else set()
    owners = (seam.where.rpartition(".") for seam in SEAMS if seam.package in ("trl", "transformers"))
    rows = {name for owner, _, name in owners if ":" in owner and resolve(owner) in kind.__mro__}
    return sorted((own - python - made) & inherited - rows)


def private_names(source):
    """Private names that code reads, sets or imports, and those that it names in a text."""
    names, texts = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, (ast.alias, ast.keyword)):
            names.add(getattr(node, "name", None) or getattr(node, "arg", None) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    private = re.compile(r"_[a-zA-Z]\w*").fullmatch
    return set(filter(private, names)), set(filter(private, texts))


def defined_by_us():
    """Names of functions, classes, variables and attributes that the package defines itself."""
    names = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                names.add(getattr(node, "attr", None) or node.id)
    return names


OURS = defined_by_us()
# What a trainer of TRL's defines is a seam even where our code sets it as well.
OF_TRAINERS = {
    name for trainer in TRAINERS for base in of_others(trainer) for name in {*vars(base), *set_in_methods(base)}
}
ROWS = {seam.where.replace(":", ".").rpartition(".")[2] for seam in SEAMS}
KEYS = {key for seam in SEAMS for key in seam.keys}


def attributes_without_row(source):
    """Private names of other projects in this code that the table lacks."""
    names, texts = private_names(source)
    return sorted(((names - OURS - set(dir(os))) | ((names | texts) & OF_TRAINERS)) - ROWS)


def rollout_keys():
    """Keys of the dictionary that TRL's rollouts are."""
    method = inspect.unwrap(resolve("trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"))
    keys = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).partition("[")[0] == "output":
            values = getattr(node.value, "keys", None) or [getattr(node.targets[0], "slice", None)]
            keys |= {value.value for value in values if isinstance(value, ast.Constant)}
    return keys


ROLLOUT_KEYS = rollout_keys()


def keys_without_row(source):
    """Keys of TRL's rollouts in this code that the table lacks."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    # A tokenizer returns "token_type_ids" as well.
    return sorted((texts & ROLLOUT_KEYS) - KEYS - {"token_type_ids"})


def test_every_override_of_every_subclass_and_mixin_stands_in_the_table():
    found = {kind.__name__: missing for kind in subclasses() if (missing := overrides_without_row(kind))}
    assert {"RewardTrainer", "PPOTrainer", "RewardConfig", "PPOConfig"} <= {kind.__name__ for kind in subclasses()}
    assert found == {}


def test_every_private_name_of_other_projects_stands_in_the_table():
    found = {str(path.relative_to(ROOT)): attributes_without_row(path.read_text()) for path in ROOMS}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_key_of_trls_rollouts_stands_in_the_table():
    found = {str(path.relative_to(ROOT)): keys_without_row(path.read_text()) for path in ROOMS}
    assert {path: keys for path, keys in found.items() if keys} == {}


def test_a_planted_override_attribute_and_key_are_found():
    class Mixin:
        def _get_eval_sampler(self, eval_dataset):
            return None

    class Planted(Mixin, GRPOTrainer):
        def _inner_training_loop(self):
            return None

    assert overrides_without_row(Planted) == ["_get_eval_sampler", "_inner_training_loop"]
    planted = """
from accelerate.utils.launch import _filter_args
def f(self, trainer, state, rollouts):
    self._env_tools = getattr(trainer, "_environment_pool")
    with swapped(trainer, _pending_metrics={}):
        return state._of_nobody, trainer._step, rollouts["num_tiles"], rollouts["prompt_ids"]
"""
    found = ["_env_tools", "_environment_pool", "_filter_args", "_of_nobody", "_pending_metrics"]
    assert attributes_without_row(planted) == found
    assert keys_without_row(planted) == ["num_tiles"]


@pytest.mark.parametrize("config", [GRPOConfig, RewardConfig])
def test_fields_of_our_config_do_not_hide_fields_of_trls(config):
    import trl

    assert not set(config.__annotations__) & set(getattr(trl, config.__name__).__dataclass_fields__)


def test_a_version_outside_the_window_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "trl", ("99.0", None))
    with pytest.raises(SupportError, match=r"pip install 'trl>=99\.0'"):
        versions.check_versions()


@pytest.mark.parametrize("name", ["AsyncGRPOTrainer", "GRPOTrainer", "PPOTrainer", "RewardTrainer"])
def test_a_trainer_beside_unsloth_is_refused_before_anything_loads(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(ConfigError, match=r"^unsloth is imported, which replaces parts of TRL"):
        getattr(trl_ext, name)(model="a/model")


# Versions that nobody has tested -------------------------------------------------------------------------------------


@pytest.fixture
def newer_trl(monkeypatch, tmp_path):
    """Let the installed TRL be the only package that is newer than what was tested; return the folder of the marks."""
    for package in versions.TESTED:
        monkeypatch.setitem(versions.TESTED, package, "1.0" if package == "trl" else "99.0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    versions._warn_once.cache_clear()
    return tmp_path


def test_the_table_is_walked_once_for_an_environment_and_each_process_warns_once(newer_trl, monkeypatch, capsys):
    versions.check_versions()
    monkeypatch.setattr(Seam, "problem", property(lambda seam: pytest.fail("walked again")))
    versions.check_versions()
    assert len((newer_trl / "trl_ext_seams").read_text().split()) == 1
    assert capsys.readouterr().err.count("warning: Newer than what trl_ext was tested with: trl 1.") == 1


def test_a_missing_seam_is_refused_by_its_name_with_what_it_was_for(newer_trl, monkeypatch):
    monkeypatch.delattr("trl.trainer.grpo_trainer.GRPOTrainer._calculate_rewards")
    words = (
        r"on trl\S+:GRPOTrainer\._calculate_rewards, which is not there .* fail together .* install 'trl==1\.0\.\*'$"
    )
    for _ in range(2):
        with pytest.raises(SupportError, match=words):
            versions.check_versions()
    assert not list(newer_trl.iterdir())


def test_with_tested_versions_nothing_is_walked_and_nothing_printed(newer_trl, monkeypatch, capsys):
    monkeypatch.setitem(versions.TESTED, "trl", "99.0")
    monkeypatch.setitem(sys.modules, "trl_ext.compat.seams", None)
    versions.check_versions()
    assert capsys.readouterr() == ("", "") and not list(newer_trl.iterdir())


@pytest.mark.parametrize(("device", "is_narrow"), [("cpu", True), ("cuda", False)])
def test_a_processor_has_narrow_tiles_of_the_head_within_the_block(device, is_narrow):
    from trl.trainer import utils

    wide = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    with head_in_cache(device):
        assert (utils._CHUNKED_LOGPROB_CHUNK_SIZE < wide) == is_narrow
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == wide


@pytest.mark.parametrize(
    "accepted",
    [{"scale", "window_size", "enable_gqa"}, {"scale", "window_size"}],
    ids=["torch 2.12 and later", "torch 2.11"],
)
def test_varlen_attention_is_called_as_the_installed_signature_wants(accepted, monkeypatch):
    calls = {}

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        calls.update(options, heads=(q.shape[1], k.shape[1]))
        assert set(options) <= accepted
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(compat_torch, "_varlen_parameters", lambda: frozenset(accepted))
    q, k = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    compat_torch.call_varlen_attn(q, k, k, None, None, 5, 5, scale=0.5, window_left=-1)
    assert calls["window_size"] == (-1, 0)
    assert calls["scale"] == 0.5
    assert calls["heads"] == ((4, 2) if "enable_gqa" in accepted else (4, 4))


def test_a_newer_torch_is_named_by_doctor_and_by_no_other_command(monkeypatch, tmp_path, capsys):
    """An installer takes the newest torch: a warning on every command would say nothing."""
    for package in versions.TESTED:
        monkeypatch.setitem(versions.TESTED, package, "1.0" if package == "torch" else "99.0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    versions._warn_once.cache_clear()
    versions.check_versions()
    assert not capsys.readouterr().err
    (finding,) = untested_findings()
    assert finding.level == "note" and f"torch {versions.version('torch')} (tested: up to 1.0)" in finding.what
