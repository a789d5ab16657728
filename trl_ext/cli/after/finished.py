"""Read a finished run's folder: weights or an adapter, tokenizer, recipe, rules.

Finding a run loads no weights: files are checked by name, size and the headers of safetensors.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.monitor.record import RULES_FILE, read_record
from trl_ext.rewards import RuleSet

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run; no weights are loaded yet.

    Args:
        folder: Holds the weights or the adapter: the run's output_dir, or one of its checkpoints.
        root: The run's output_dir, which holds recipe.yaml and rules.yaml.
        adapter: Content of adapter_config.json; None if `folder` holds full weights.
        config: Content of config.json, empty with an adapter.
        recipe: Content of recipe.yaml; empty if there is none.
        has_rules: True if rules.yaml holds the run's rules.
    """

    folder: Path
    root: Path
    adapter: Mapping[str, Any] | None
    config: Mapping[str, Any]
    recipe: Mapping[str, Any]
    has_rules: bool = False

    @property
    def weights(self) -> str:
        """Name or folder of the weights: the adapter's base model, or the run's folder."""
        return self.adapter["base_model_name_or_path"] if self.adapter is not None else str(self.folder)

    @property
    def is_reward_model(self) -> bool:
        """True for a sequence classification model or adapter."""
        from trl_ext.trainers.forward.reward_input import RECORD_FILE

        names = self.config.get("architectures") or ()
        task = (self.adapter or {}).get("task_type")
        classifies = task == "SEQ_CLS" or any("SequenceClassification" in name for name in names)
        return classifies or (self.folder / RECORD_FILE).is_file()

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of the adapter's base model that the run used; None for the newest."""
        is_known = self.adapter is not None and self.recipe.get("model_name_or_path") == self.weights
        return self.recipe.get("model_revision") if is_known else None

    def load_model(self, trust_remote_code: bool = False) -> Any:
        """Load a policy's weights in the dtype of the files, with the run's adapter if there is any."""
        from trl.trainer.utils import create_model_from_path

        from trl_ext.scripts.process import quiet_libraries

        quiet_libraries()
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": self.revision}
        model = create_model_from_path(self.weights, dtype="auto", **options).eval()
        if self.adapter is None:
            return model
        from peft import PeftModel

        try:
            with warnings.catch_warnings():
                # A warning about merging.
                warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
                # PEFT would continue with an adapter that has no effect.
                warnings.filterwarnings("error", message="Found missing adapter keys")
                return PeftModel.from_pretrained(model, str(self.folder)).eval()
        except (RuntimeError, UserWarning) as error:
            if isinstance(error, RuntimeError) and "size mismatch" not in str(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"The adapter in {self.folder} does not fit the model {self.weights}: {reason}. Check "
                f"base_model_name_or_path in its {_ADAPTER}."
            ) from error

    def load_tokenizer(self, trust_remote_code: bool = False) -> Any:
        """Load the run's tokenizer, or the base model's; it pads on the left."""
        from transformers import AutoTokenizer

        own = (self.folder / "tokenizer_config.json").is_file()
        name = str(self.folder) if own else self.weights
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def load_rules(self, path: str | None = None) -> RuleSet:
        """Build the rules of a file or of the run; raise ConfigError if there are none, or they cannot be built."""
        if path is None and not self.has_rules:
            raise ConfigError(f"{self.root} holds no {RULES_FILE} with rules. Name such a file: --rules rules.yaml.")
        return RuleSet.from_yaml(path or self.root / RULES_FILE)


def find_run(path: str) -> FinishedRun:
    """Find the model of a run.

    Args:
        path: The run's output_dir, or one of its checkpoints. For an output_dir without a final model, its newest
            complete checkpoint is used.

    Raises:
        ConfigError: There is no such folder, or no base model at the adapter's path.
        DataError: The folder holds no model, or a model or record that is not complete.
    """
    from trl_ext.trainers.checkpoints.manifest import UNFINISHED
    from trl_ext.trainers.checkpoints.save import step_of

    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {path}. Give the output_dir of a run, or one of its checkpoints.")
    root = folder if step_of(folder) is None else folder.parent
    if root.name == UNFINISHED:
        raise DataError(f"{folder} was not written to its end. Take another checkpoint in {root}.")
    folder = _with_model(folder)
    _check_manifest(folder)
    adapter: dict[str, Any] | None = None
    config: dict[str, Any] = {}
    if (folder / _ADAPTER).is_file():
        _check_weights(folder, _ADAPTER_WEIGHTS)
        adapter = _read_adapter(folder)
    else:
        _check_weights(folder, _WEIGHTS)
        config = _read_json(folder / _CONFIG)
    record = read_record(root)
    recipe, rules = ({}, None) if record is None else (record.recipe, record.rules)
    run = FinishedRun(folder, root, adapter, config, recipe, rules is not None)
    if run.weights.startswith(("/", "./", "../")) and not Path(run.weights).is_dir():
        raise ConfigError(
            f"The base model of {folder}, {run.weights}, is not there. Write where it is now, or its name on the hub, "
            f"into {_ADAPTER} as base_model_name_or_path."
        )
    return run


def _with_model(folder: Path) -> Path:
    """Return the folder if it holds a model, else its newest complete checkpoint; raise DataError if it has none."""
    from trl_ext.trainers.checkpoints.save import newest_whole

    if (folder / _ADAPTER).is_file() or (folder / _CONFIG).is_file():
        return folder
    newest = newest_whole(folder)
    if newest is None:
        raise DataError(
            f"{folder} holds neither a model nor a whole checkpoint: there is no {_CONFIG} and no {_ADAPTER} in "
            "it. Give the output_dir of a run that has saved something."
        )
    return folder / newest


def _check_manifest(folder: Path) -> None:
    """Raise DataError if the folder has a manifest, and a file of it is missing or has another size."""
    from trl_ext.trainers.checkpoints.manifest import MANIFEST, Damaged, Manifest

    if (folder / MANIFEST).is_file():
        try:
            Manifest.read(folder).check_sizes(folder)
        except Damaged as reason:
            raise DataError(f"{folder} is not complete: {reason}. Use another checkpoint.") from reason


def _read_adapter(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json; raise DataError if it names no base model."""
    adapter = _read_json(folder / _ADAPTER)
    if not adapter.get("base_model_name_or_path"):
        raise DataError(f"{folder / _ADAPTER} does not name its base model. Write base_model_name_or_path into it.")
    return adapter


def _check_weights(folder: Path, names: tuple[str, ...]) -> None:
    """Raise DataError unless all files of the weights, or of their parts, are there and complete."""
    from safetensors import SafetensorError, safe_open

    files = [name for name in names if (folder / name).is_file()][:1]
    for index in [] if files else [folder / f"{name}.index.json" for name in names]:
        parts = _read_json(index).get("weight_map") if index.is_file() else None
        files += set(parts.values()) if isinstance(parts, dict) else []
    if not files:
        raise DataError(
            f"{folder} holds no weights ({names[0]}): it was not written to its end, or they are divided by process. "
            "Take another checkpoint, or join them by the zero_to_fp32.py in the folder."
        )
    for file in (folder / name for name in files):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy"):
                    pass  # reads the header, and compares it with the file's length
            file.stat()
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{file} is missing or was not written to its end ({error}). Save the model again, or take another "
                "checkpoint."
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. It was not written to its end, or is damaged.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys. It was not written to its end, or is damaged.")
    return content
