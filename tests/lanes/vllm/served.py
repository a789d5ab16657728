"""Trains a few steps of GRPO with a served vLLM, ahead: `python -m tests.lanes.vllm.served MODEL FOLDER URL`.

FOLDER/logs.json gets what was logged, and how far the log-probabilities of each block of completions are from those of
each set of weights that was pushed: the mean over their tokens, `apart[block][push]`.

TRL's client pushes weights by NCCL, which a processor does not have. Here it writes them into a file in
FOLDER/push_<number>/, and vLLM's worker reads it: `POST /collective_rpc` calls its `reload_weights`. All else is sent
over HTTP as it is on cards.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl.generation.vllm_client import VLLMClient

from tests.lanes.vllm.train import SETTINGS, token_reward
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.trainers.generation.vllm_servers import VLLMClients

FILE = "model.safetensors"


class Files:
    """Stands in for NCCL in TRL's client, and keeps what the server gave.

    Args:
        folder: Of the weights that are pushed.

    Attributes:
        pushes: Folders, in order.
        blocks: Answers, a dictionary for each block of completions.
    """

    def __init__(self, folder: str):
        self.folder, self.pushes, self.blocks = Path(folder), [], []
        VLLMClient.init_communicator = lambda client, device=0: None
        VLLMClient.close_communicator = lambda client: None
        VLLMClient.update_named_params = lambda client, metadata, named_params: self.push(client, named_params)
        generate = VLLMClients.generate

        def kept(client, *args, **sampling):
            self.blocks.append(generate(client, *args, **sampling))
            return self.blocks[-1]

        VLLMClients.generate = kept

    def push(self, client, named_params):
        folder = self.folder / f"push_{len(self.pushes)}"
        folder.mkdir()
        # Copies: safetensors refuses weights that share memory.
        save_file({name: weight.detach().clone() for name, weight in named_params}, folder / FILE)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client._post(f"{client.base_url}/collective_rpc", json=call)
        self.pushes.append(folder)


@torch.no_grad()
def mean_difference(model, block) -> float:
    """The mean of |a - b| over the tokens of a block, log-probabilities of the server and of the model."""
    each, differences = len(block["completion_ids"]) // len(block["prompt_ids"]), []
    for row, (completion, given) in enumerate(zip(block["completion_ids"], block["logprobs"], strict=True)):
        prompt = block["prompt_ids"][row // each]
        logps = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logps[range(len(completion)), completion]
        differences += (own - torch.tensor(given).flatten()).abs().tolist()
    return sum(differences) / len(differences)


def main(model: str, folder: str, url: str) -> None:
    files = Files(folder)
    prompts = Dataset.from_dict({"prompt": [f"w{i % 90} w{3 * i % 90} w{7 * i % 90}" for i in range(32)]})
    server = dict(vllm_mode="server", vllm_server_base_url=url, generation_ahead=1)
    trainer = GRPOTrainer(model, token_reward, GRPOConfig(folder, **SETTINGS | server), prompts)
    trainer.train()
    found = {"steps": [entry for entry in trainer.state.log_history if "grad_norm" in entry]}
    found |= {"packs": trainer._packs, "info": trainer.vllm_generation.vllm_client.get_server_info()}
    found |= {"apart": [[] for _ in files.blocks]}
    for push in files.pushes:
        trainer.model.load_state_dict(load_file(push / FILE))
        for row, block in zip(found["apart"], files.blocks, strict=True):
            row.append(mean_difference(trainer.model.eval(), block))
    Path(folder, "logs.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
