"""One client for several vLLM servers with the same weights: prompts are divided among them, all else goes to all.

`vllm_server_base_url` names them with commas between. The trainer and the workers of all servers are one NCCL group,
so that a weight is broadcast once.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, cycle
from typing import Any

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from trl_ext.compat.swap import swapped
from trl_ext.errors import ConfigError

# Requests of one prompt each: a server answers alone.
_OF_ONE_PROMPT = ("/inference/v1/generate", "/v1/chat/completions")


def client_of(args: Any) -> AbstractContextManager[None]:
    """Let TRL make the client of several servers inside the block, if the config names several.

    Raises:
        ConfigError: A name is empty, or given twice.
    """
    urls = (getattr(args, "vllm_server_base_url", None) or "").split(",")
    if len(urls) == 1 or not args.use_vllm or args.vllm_mode != "server":
        return nullcontext()
    if not all(urls) or len(set(urls)) < len(urls):
        raise ConfigError(
            f"vllm_server_base_url is {args.vllm_server_base_url!r}. Write different addresses with commas between, "
            "such as http://127.0.0.1:8000,http://127.0.0.1:8001."
        )
    return swapped(vllm_generation, VLLMClient=VLLMClients)


class VLLMClients(VLLMClient):
    """TRL's client, of several servers.

    Args:
        base_url: Their addresses, with commas between.
    """

    def __init__(self, base_url: str, **kwargs: Any) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.__init__."""
        self.base_urls = [url.strip().rstrip("/") for url in base_url.split(",")]
        self._turns = cycle(self.base_urls)
        self._workers: list[int] = []
        super().__init__(base_url=self.base_urls[0], **kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Overrides trl.generation.vllm_client.VLLMClient.check_server: all of them."""
        for url in self.base_urls:
            with swapped(self, base_url=url):
                super().check_server(total_timeout, retry_interval)

    def get_world_size(self) -> int:
        """Overrides trl.generation.vllm_client.VLLMClient.get_world_size: the workers of all servers."""
        self._workers = []
        for url in self.base_urls:
            with swapped(self, base_url=url):
                self._workers.append(super().get_world_size())
        return sum(self._workers)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Overrides trl.generation.vllm_client.VLLMClient._post: each server gets its part."""
        path = url.removeprefix(self.base_url)
        post = super()._post
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
        """The body for each server that takes part, by its address."""
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


def divided(rows: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Divide rows into at most so many parts in order, none of them empty, whose lengths differ by one at most."""
    num_parts = min(num_parts, len(rows))
    ends = [len(rows) * (part + 1) // num_parts for part in range(num_parts)]
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
