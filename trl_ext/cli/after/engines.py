"""Completions of token ids by transformers or vLLM, with the same inputs and outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import ConfigError, OutOfMemoryError, SupportError

BACKENDS = ("transformers", "vllm")
# The ranks that vLLM can be started with; https://docs.vllm.ai, LoRAConfig.max_lora_rank.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_VLLM_PROMPTS = 1024  # per call, so that finished completions can be written


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling.

    Args:
        num_generations: Completions per prompt.
        temperature: 0 is greedy.
        max_new_tokens: Most tokens of a completion.
        top_p, top_k, min_p, repetition_penalty: As in transformers; 1.0, 0, None and 1.0 have no effect.
    """

    num_generations: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        for key in ("num_generations", "max_new_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"--{key} is {getattr(self, key)}. Give at least 1.")
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature is {self.temperature}. Give 0 for greedy, or more.")
        if self.temperature == 0 and self.num_generations > 1:
            raise ConfigError(
                f"At temperature 0 the {self.num_generations} completions of a prompt would all be equal. Give "
                "--num_generations 1, or a --temperature above 0."
            )

    @classmethod
    def of(cls, recipe: Mapping[str, Any], arguments: Any) -> "Sampling":
        """Return a recipe's settings, overridden by a command line's that are not None."""
        own = {key: recipe.get(key) for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        own["max_new_tokens"] = recipe.get("max_completion_length") or recipe.get("response_length")
        asked = {key: getattr(arguments, key) for key in ("num_generations", "temperature", "max_new_tokens", "seed")}
        given = [*own.items(), *asked.items()]
        return cls(**{key: value for key, value in given if value is not None})


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion: token ids with the token that ended it, text without special tokens, and what ended it.

    `finish_reason` is "stop" if the model ended it, "length" if the limit did.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def stop_tokens(recipe: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the token that alone ends a completion, as PPO's `stop_token_id` or `stop_token` has it; else []."""
    given = recipe.get("stop_token_id")
    eos = [tokenizer.eos_token_id] if recipe.get("stop_token") else []
    return eos if given is None else [given]


class TransformersEngine:
    """Completions by `generate` of transformers, in batches padded on the left.

    `batch_size` is the most sequences in a batch; it is halved if memory runs out.
    """

    def __init__(self, run: Any, tokenizer: Any, batch_size: int = 32, trust_remote_code: bool = False):
        if batch_size < 1:
            raise ConfigError(f"--batch_size is {batch_size}. Give at least 1.")
        self._model = run.load_model(trust_remote_code=trust_remote_code)
        self._tokenizer, self._batch_size = tokenizer, batch_size
        own = self._model.generation_config.eos_token_id
        # As in training: the recipe's, or the tokenizer's EOS and the generation config's.
        eos = [tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or ())]
        self._stop_ids = stop_tokens(run.recipe, tokenizer) or eos

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[Completion]]:
        """Yield the completions of each prompt, in the order of the prompts."""
        import torch
        from transformers import set_seed

        from trl_ext.trainers.step.out_of_memory import is_out_of_memory

        set_seed(sampling.seed)
        rows = [ids for ids in prompts for _ in range(sampling.num_generations)]
        done: list[Completion] = []
        at, size = 0, self._batch_size
        while at < len(rows):
            try:
                done += self._batch(rows[at : at + size], sampling)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    raise OutOfMemoryError(
                        f"A prompt of {len(rows[at])} tokens with {sampling.max_new_tokens} to come does not fit this "
                        "machine's memory by itself. Lower --max_new_tokens, or take a larger card."
                    ) from error
                size //= 2
                torch.cuda.empty_cache()
                continue
            at += size
            while len(done) >= sampling.num_generations:
                yield done[: sampling.num_generations]
                del done[: sampling.num_generations]

    def _batch(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        import torch
        from transformers import GenerationConfig

        model: Any = self._model
        inputs = self._tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(model.device)
        drawn = {key: getattr(sampling, key) for key in ("temperature", "top_p", "top_k", "min_p")}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampling.temperature > 0,
            repetition_penalty=sampling.repetition_penalty,
            pad_token_id=self._tokenizer.pad_token_id,
            bos_token_id=self._tokenizer.bos_token_id,
            eos_token_id=self._stop_ids,
            **(drawn if sampling.temperature > 0 else {}),
        )
        # `generate` would fill defaults of `config` from the model's generation config.
        model.generation_config = config
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=config
            )
        found = []
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((at for at, token in enumerate(ids, 1) if token in self._stop_ids), None)
            text = self._tokenizer.decode(ids[:end], skip_special_tokens=True)
            found.append(Completion(tuple(ids[:end]), text, "length" if end is None else "stop"))
        return found


class VllmEngine:
    """Completions by vLLM, with a run's adapter as a LoRA request.

    Args:
        run: A FinishedRun of a policy.
        trust_remote_code: Run code that comes with the weights.
    """

    def __init__(self, run: Any, tokenizer: Any, trust_remote_code: bool = False):
        try:
            from vllm import LLM
            from vllm.lora.request import LoRARequest
        except ModuleNotFoundError as error:
            raise SupportError("vLLM is not installed. Run: pip install 'trl_ext[vllm]'") from error
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": run.revision}
        self._lora = None
        if run.adapter is not None:
            rank = max([run.adapter["r"], *(run.adapter.get("rank_pattern") or {}).values()])
            options |= {"enable_lora": True, "max_lora_rank": next(r for r in (*_VLLM_RANKS, rank) if r >= rank)}
            self._lora = LoRARequest("run", 1, str(run.folder.resolve()))
        self._model = LLM(model=run.weights, **options)
        self._tokenizer, self._stop_ids = tokenizer, stop_tokens(run.recipe, tokenizer)

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[Completion]]:
        """Yield the completions of each prompt, in the order of the prompts."""
        from vllm import SamplingParams

        params = SamplingParams(
            n=sampling.num_generations,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p or 0.0,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            # vLLM adds the ids of the generation config, unless it ignores EOS.
            stop_token_ids=self._stop_ids or [self._tokenizer.eos_token_id],
            ignore_eos=bool(self._stop_ids),
        )
        for at in range(0, len(prompts), _VLLM_PROMPTS):
            wanted = [{"prompt_token_ids": list(ids)} for ids in prompts[at : at + _VLLM_PROMPTS]]
            for request in self._model.generate(wanted, params, use_tqdm=False, lora_request=self._lora):
                texts = [self._tokenizer.decode(said.token_ids, skip_special_tokens=True) for said in request.outputs]
                yield [
                    Completion(tuple(said.token_ids), text, said.finish_reason)
                    for said, text in zip(request.outputs, texts, strict=True)
                ]


def make_engine(
    backend: str, run: Any, tokenizer: Any, batch_size: int, trust_remote_code: bool
) -> "TransformersEngine | VllmEngine":
    """Load a policy for one of BACKENDS.

    Raises ConfigError for files that a library refuses, SupportError if vLLM is not installed.

    Args:
        backend: "transformers" or "vllm".
        run: A finished run, whose `folder` holds the policy.
        tokenizer: The policy's.
        batch_size: Prompts that are generated together; vLLM chooses for itself.
        trust_remote_code: Whether model code of the folder may run.
    """
    from trl_ext.scripts.exit import refusals

    with refusals(f"{run.folder} cannot be loaded"):
        if backend == "vllm":
            return VllmEngine(run, tokenizer, trust_remote_code)
        return TransformersEngine(run, tokenizer, batch_size, trust_remote_code)
