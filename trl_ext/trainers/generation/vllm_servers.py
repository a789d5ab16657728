"""One client for several vLLM servers with the same weights: prompts are divided among them, other calls go to all.

`vllm_server_base_url` names them, separated by commas. The trainer and the workers of all servers are one NCCL group,
so that a weight is broadcast once. The client can request completions ahead and return them when TRL asks for them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate, chain, cycle
from operator import itemgetter
from threading import Thread, local
from typing import Any
from urllib.request import urlopen

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from trl_ext.compat.swap import swapped
from trl_ext.compat.vllm import starts
from trl_ext.errors import ConfigError

_HEALTH_S = 5.0  # timeout of a server's health check
_POLL_S = 0.5
# Called with the number of a prompt and the token ids of its completions.
OnAnswer = Callable[[int, list[list[int]]], None]
_AT_ONCE = 64  # simultaneous requests of one prompt each; TRL's number for chats
# Paths whose requests hold one prompt each, so that a single server answers.
_OF_ONE_PROMPT = ("/inference/v1/generate", "/v1/chat/completions")


def client_of(args: Any) -> AbstractContextManager[None]:
    """Make TRL use our client inside the block, if the config names several servers or generates ahead.

    Raises:
        ConfigError: An address is empty or given twice.
    """
    urls = (getattr(args, "vllm_server_base_url", None) or "").split(",")
    if not args.use_vllm or args.vllm_mode != "server":
        return nullcontext()
    if len(urls) > 1 and (not all(urls) or len(set(urls)) < len(urls)):
        raise ConfigError(
            f"vllm_server_base_url is {args.vllm_server_base_url!r}. Write different addresses with commas between, "
            "such as http://127.0.0.1:8000,http://127.0.0.1:8001."
        )
    is_ours = len(urls) > 1 or bool(getattr(args, "generation_ahead", 0))
    return swapped(vllm_generation, VLLMClient=VLLMClients) if is_ours else nullcontext()


class PendingGeneration:
    """Completions that servers generate while something else runs.

    Args:
        prompts: Token ids of each prompt, once per prompt.
        sampling: The other arguments of `VLLMClient.generate`.
        version: Optimizer steps before the weights that sample.

    Attributes:
        seconds: Duration of the generation; None until it ends, and after loading from a checkpoint.
        answers: The result of `VLLMClient.generate`, or its exception.
    """

    def __init__(self, prompts: list[list[int]], sampling: Mapping[str, Any], version: int):
        self.prompts, self.sampling, self.version = prompts, dict(sampling), version
        self.seconds: float | None = None
        self._began_s = time.monotonic()
        self.answers: Future[dict[str, Any]] = Future()

    def is_for(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> bool:
        """Return True if the request had these prompts and this sampling."""
        return self.prompts == list(map(list, prompts)) and self.sampling == dict(sampling)

    def is_there(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; return True if the answers have arrived or failed."""
        return bool(wait([self.answers], timeout_s).done)

    @property
    def has_failed(self) -> bool:
        """True if the request has failed."""
        return self.answers.done() and self.answers.exception() is not None

    def end(self, answers: dict[str, Any] | None, error: BaseException | None = None) -> None:
        """Set the answers or the error, unless it was set before."""
        with suppress(InvalidStateError):
            if error is not None:
                self.answers.set_exception(error)
            else:
                self.answers.set_result(answers or {})
                self.seconds = time.monotonic() - self._began_s

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the answers."""
        state = {"prompts": self.prompts, "sampling": self.sampling, "version": self.version}
        return state | {"answers": self.answers.result()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "PendingGeneration":
        """Return the request that `state_dict` describes."""
        asked = PendingGeneration(state["prompts"], state["sampling"], state["version"])
        asked.end(state["answers"])
        asked.seconds = None
        return asked


class VLLMClients(VLLMClient):
    """TRL's client for several servers.

    Args:
        base_url: Their addresses, separated by commas.

    Attributes:
        pending: The request for completions ahead.
        is_lost: True if a server was lost before it had the new weights.
        takes_pending: True while TRL asks for the completions ahead; an evaluation may ask for the same prompts.
        last_result: The request ahead that `generate` returned last; None if it sampled with the current weights.
    """

    pending: PendingGeneration | None = None
    is_lost = takes_pending = False
    last_result: PendingGeneration | None = None
    _has_pushed = False
    _sampling: Mapping[str, Any] = {}

    def __init__(self, base_url: str, **kwargs: Any) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.__init__."""
        self.base_urls = [url.strip().rstrip("/") for url in base_url.split(",")]
        self._turns = cycle(self.base_urls)
        self._workers: list[int] = []
        self._of_thread = local()
        self._starts = starts()
        super().__init__(base_url=self.base_urls[0], **kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.check_server: checks all servers."""
        for url in self.base_urls:
            with swapped(self, base_url=url):
                super().check_server(total_timeout, retry_interval)

    def get_world_size(self) -> int:
        """Overrides trl.generation.vllm_client.VLLMClient.get_world_size: counts the workers of all servers."""
        self._workers = []
        for url in self.base_urls:
            with swapped(self, base_url=url):
                self._workers.append(super().get_world_size())
        return sum(self._workers)

    def generate(  # type: ignore[override]  # TRL names each argument of the sampling
        self, prompts: Any, features: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        """Overrides trl.generation.vllm_client.VLLMClient.generate: returns the request ahead if it matches."""
        asked, self._sampling, self.last_result = self.pending, sampling, None
        if asked is None or not self.takes_pending or not asked.is_for(prompts, sampling):
            return super().generate(prompts, features, **sampling)
        self.pending, self.last_result = None, asked
        return asked.answers.result()

    def submit(self, prompts: list[list[int]], version: int, on_answer: OnAnswer | None = None) -> None:
        """Start generating for these prompts, with the sampling of the last `generate`.

        Args:
            prompts: Token ids of each prompt.
            version: Optimizer steps before the weights that the servers have.
            on_answer: Called in a thread with the number of a prompt and its completions, as they arrive.
        """
        from requests import Session  # installed with vLLM's clients, not with TRL alone

        asked = self.pending = PendingGeneration(prompts, self._sampling, version)
        parts = divided(range(len(prompts)), len(self.base_urls))
        url_of = {number: url for url, part in zip(self.base_urls, parts, strict=False) for number in part}

        def answer(number: int) -> dict[str, Any]:
            # A retry could reach a server that was restarted with other weights.
            self._of_thread.url, self._of_thread.session = url_of[number], Session()
            answers = VLLMClient.generate(self, [prompts[number]], **asked.sampling)
            if on_answer is not None:
                on_answer(number, answers["completion_ids"])
            return answers

        def all_answers() -> None:
            try:
                with ThreadPoolExecutor(min(len(prompts), _AT_ONCE)) as threads:
                    answers = list(threads.map(answer, range(len(prompts))))
                asked.end({name: joined(map(itemgetter(name), answers)) for name in answers[0]})
            except BaseException as error:  # raised again where the answers are used
                asked.end(None, error)

        Thread(target=all_answers, name="generation_ahead", daemon=True).start()

    def is_up(self) -> bool:
        """Return True if all servers answer and none was restarted since the weights were pushed."""
        try:
            answers = (urlopen(f"{url}/health", timeout=_HEALTH_S) for url in self.base_urls)
            return self._starts == starts() and all(answer.status == 200 for answer in answers)
        except OSError:
            return False

    def connect_again(self, device: Any, patience_s: float) -> str:
        """Join all servers in a new group; their weights are then not ours.

        Args:
            device: The trainer's device, for the group.
            patience_s: Seconds within which all servers must answer.

        Returns:
            Why it failed; "" if it succeeded.
        """
        until_s = time.monotonic() + patience_s
        self.close_communicator()
        while True:
            self._starts = starts()
            if self.is_up():
                break
            if time.monotonic() > until_s:
                return f"A vLLM server of {', '.join(self.base_urls)} does not answer after {patience_s:.0f} s."
            time.sleep(_POLL_S)
        self.init_communicator(device)
        self.is_lost = False
        return ""

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.update_named_params.

        If completions ahead are available, a server that is lost meanwhile is joined again later.
        """
        try:
            super().update_named_params(metadata, named_params)
            self._has_pushed = True
        except Exception as error:
            if not self._has_pushed:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise ConfigError(
                    f"vLLM at {' or '.join(self.base_urls)} refused this run's weights, and serves {self.model}. "
                    f"Serve the model that is trained. Its reason: {reason}"
                ) from error
            if not self.takes_pending or self.pending is None:
                raise
            self.is_lost = True
            for _ in named_params:  # the other processes gather them too
                pass
        self.is_lost = self.is_lost or self._starts != starts()

    def reset_prefix_cache(self) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.reset_prefix_cache: skips it if a server is lost."""
        if not self.is_lost:
            super().reset_prefix_cache()

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Overrides trl.generation.vllm_client.VLLMClient._post: sends each server its part."""
        path = url.removeprefix(self.base_url)
        post = super()._post
        own = vars(self._of_thread)
        if own:
            answer = own["session"].post(own["url"] + path, **kwargs)
            answer.raise_for_status()
            return dict(answer.json())
        if path in _OF_ONE_PROMPT:
            return post(next(self._turns) + path, **kwargs)
        bodies = self._bodies(path, kwargs.pop("json", None))
        with ThreadPoolExecutor(len(bodies)) as threads:
            sent = [threads.submit(post, one + path, **kwargs, **body) for one, body in bodies]
            answers = [one.result() for one in sent]
        if path == "/v1/completions":
            return {**answers[0], "choices": [choice for answer in answers for choice in answer["choices"]]}
        return answers[0]

    def _bodies(self, path: str, body: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
        """Return the address and the request body of each server that takes part."""
        urls = self.base_urls
        if body is None:
            return [(url, {}) for url in urls]
        bodies: list[dict[str, Any]] = [body] * len(urls)
        if path == "/v1/completions":
            bodies = [{**body, "prompt": part} for part in divided(body["prompt"], len(urls))]
        elif path == "/init_weight_transfer_engine":
            info = body["init_info"]
            # TRL's trainer is rank 0; the workers follow, server by server.
            firsts = accumulate(self._workers[:-1], initial=info["rank_offset"])
            bodies = [{"init_info": {**info, "rank_offset": first}} for first in firsts]
        return [(url, {"json": one}) for url, one in zip(urls, bodies, strict=False)]


def joined(lists: Iterable[list[Any] | None]) -> list[Any] | None:
    """Concatenate the lists; None if any of them is None, as log-probabilities are when not requested."""
    parts = list(lists)
    return None if any(part is None for part in parts) else list(chain.from_iterable(filter(None, parts)))


def divided(rows: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Divide rows in order into at most `num_parts` non-empty parts, whose lengths differ by at most 1."""
    num_parts = min(num_parts, len(rows))
    ends = [len(rows) * (part + 1) // num_parts for part in range(num_parts)]
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
