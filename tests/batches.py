"""Padded batches of ragged groups, and what a model says of each row alone: the reference of all packing tests."""

from dataclasses import dataclass

import torch
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import VOCAB
from trl_ext.packing.attention import packed_forward, take_segments
from trl_ext.packing.layout import lay_out
from trl_ext.trainers.forward.calls import let_positions_be_chosen
from trl_ext.trainers.step.unpadded import plan, unpad


def _tokens(count: int, draw: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCAB, (count,), generator=draw).tolist())


@dataclass(frozen=True)
class Batch:
    """Rows of prompt and completion, and the padded tensors that TRL would make of them."""

    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    width: int

    def weights(self) -> torch.Tensor:
        """[B, C] fixed random weights, 0 on padding: their product with the log-probs is the loss of the tests."""
        generator = torch.Generator().manual_seed(5)
        mask = self.attention_mask[:, -self.width :].cpu()
        return torch.randn(mask.shape, generator=generator) * mask


def batch(*groups: tuple[int, tuple[int, ...]], seed: int = 1, order: list[int] | None = None) -> Batch:
    """Groups as (prompt length, completion lengths), tokens random, padded as TRL pads."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for prompt_length, lengths in groups:
        prompt = _tokens(prompt_length, draw)
        rows += [(prompt, _tokens(length, draw)) for length in lengths]
    return padded([rows[i] for i in order] if order else rows)


def padded(rows: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Batch:
    """Rows of prompt and completion, padded as TRL pads."""
    prompt_width = max(len(p) for p, _ in rows)
    width = max(len(c) for _, c in rows)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (prompt, completion) in enumerate(rows):
        start = prompt_width - len(prompt)
        ids[i, start : prompt_width + len(completion)] = torch.tensor(prompt + completion)
        mask[i, start : prompt_width + len(completion)] = 1
    return Batch(tuple(rows), ids, mask, width)


# Ragged groups, a prompt of one token, a completion of one token, a lone row, group mates shuffled apart.
RAGGED = batch((17, (4, 11, 1, 24)), (5, (3, 9, 9)), (30, (13,)), (1, (6, 2)), order=[3, 0, 9, 5, 1, 7, 2, 8, 4, 6])


def forked(seed: int, num_rows: int = 10) -> Batch:
    """Rows that fork at random places, cut into prompt and completion anywhere.

    Prompts that are other rows with their completions, rows that are the beginning of others, equal rows.
    """
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    texts = [_tokens(number(10, 40), draw)]
    while len(texts) < num_rows:
        one = texts[number(0, len(texts))]
        kind = number(0, 6)
        at = len(one) if kind < 2 else number(1, len(one) + 1)  # goes on from the end of a row, or leaves it anywhere
        texts.append(one if kind == 5 else (*one[:at], *(_tokens(number(1, 30), draw) if kind < 4 else ())))
        if len(texts[-1]) < 2:
            texts.pop()
    cuts = [number(1, len(one)) for one in texts]
    # Half of the rows stand behind one prompt, as a group does.
    first = min(map(len, texts)) - 1
    cuts = [min(first, 9) if number(0, 2) else cut for cut in cuts]
    return padded([(one[:cut], one[cut:]) for one, cut in zip(texts, cuts, strict=True)])


def alone(model: torch.nn.Module, given: Batch, temperature: float = 1.0):
    """Log-probs and entropies [B, C] of each row forwarded by itself, without padding, with gradients."""
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return forward_alone(model, given)


def forward_alone(model: torch.nn.Module, given: Batch):
    """The same for a model that has TRL's fused head already."""
    logps, entropies = [], []
    for prompt, completion in given.rows:
        ids = torch.tensor([prompt + completion], device=next(model.parameters()).device)
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        pad = (0, given.width - len(completion))
        logps.append(torch.nn.functional.pad(out.log_probs[0, -len(completion) :], pad))
        entropies.append(torch.nn.functional.pad(out.entropy[0, -len(completion) :], pad))
    return torch.stack(logps), torch.stack(entropies)


def ready_to_pack(model: torch.nn.Module, **head) -> torch.nn.Module:
    """The model with TRL's fused head, whose attention takes segments."""
    add_fused_lm_head(model, **head)
    let_positions_be_chosen(model)
    take_segments(model.config)
    return model


def packed_logits(model: torch.nn.Module, given: Batch, share_prompt: bool = True):
    """Segments of the one flat row, and the model's plain logits on it [T, V]."""
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    (row,) = plan(flat, share_prompt)
    packed = lay_out(row, flat.sequences, flat.num_scored, given.input_ids.device)
    with torch.no_grad(), packed_forward():
        out = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, segments=packed.table, use_cache=False
        )
    return row.segments, out.logits[0]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The flattened gradient of all trainable parameters; by `backward`, which reentrant checkpointing needs."""
    model.zero_grad()
    loss.backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone() for p in parameters])
