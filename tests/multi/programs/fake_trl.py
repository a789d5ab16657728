#!/usr/bin/env python3
"""Stands in for `trl vllm-serve`: answers what TRL's client asks, from the standard library alone.

A completion is one of the prompt's last tokens, another for each of a group, and the end token. Each request is a
line of FAKE_TRL_LOG. With FAKE_TRL=dies the server ends before it listens, with FAKE_TRL=dies_later when it is asked
for completions a second time, with FAKE_TRL=deaf it never listens. With FAKE_TRL=once:PATH:N one of the servers dies
at its N-th request of that path, or a moment after it with FAKE_TRL=after:PATH:N, and lives when it is started again.
"""

import json
import os
import sys
import threading
import time
from argparse import ArgumentParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EOS = 1
BEHAVIOUR = os.environ.get("FAKE_TRL", "")
SEEN = []


class Handler(BaseHTTPRequestHandler):
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        config = {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        self.answer(
            {
                "/health": {},
                "/v1/models": {"data": [{"id": arguments.model}]},
                "/get_world_size": {"world_size": arguments.tensor_parallel_size},
                "/server_info": {"vllm_config": config},
            }[self.path.partition("?")[0]]
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        note({"port": arguments.port, "path": self.path, "body": body})
        SEEN.append(self.path)
        if BEHAVIOUR == "dies_later" and SEEN.count("/v1/completions") == 2:
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        moment, _, rest = BEHAVIOUR.partition(":")
        path, _, number = rest.partition(":")
        if moment in FATE and self.path == path and SEEN.count(path) == int(number) and is_first_to_die():
            FATE[moment]()
        self.answer(completions(body) if self.path == "/v1/completions" else {"success": True})

    def log_message(self, *words):
        pass


def is_first_to_die():
    try:
        open(os.environ["FAKE_TRL_LOG"] + ".died", "x").close()
    except FileExistsError:
        return False
    return True


def die():
    print("CUDA error: an illegal memory access was encountered", flush=True)
    os._exit(1)


FATE = {
    "once": die,
    "after": lambda: threading.Timer(0.3, die).start(),
}


def completions(body):
    return {"choices": [choice(prompt, place) for prompt in body["prompt"] for place in range(body["n"])]}


def choice(prompt, place):
    ids = [prompt[-1 - place % len(prompt)], EOS]
    names = [f"token_id:{i}" for i in ids]
    logprobs = {"tokens": names, "token_logprobs": [-1.0] * 2, "top_logprobs": [{name: -1.0} for name in names]}
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


def note(line):
    with open(os.environ["FAKE_TRL_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    assert sys.argv[1] == "vllm-serve"
    parser = ArgumentParser()
    for name in ("model", "host", "revision", "vllm_model_impl", "trust_remote_code"):
        parser.add_argument(f"--{name}")
    for name in ("port", "tensor_parallel_size", "max_model_len", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu_memory_utilization", type=float)
    arguments, for_vllm = parser.parse_known_args(sys.argv[2:])
    note({"pid": os.getpid(), "cards": os.environ.get("CUDA_VISIBLE_DEVICES"), **vars(arguments)})
    if BEHAVIOUR == "dies":
        sys.exit("No available memory for the cache blocks.")
    if BEHAVIOUR == "deaf":
        time.sleep(600)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
