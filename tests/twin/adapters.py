"""Every private name that the twin replaces, each in a context manager: what, why, and when it can go.

All of them make a place that computes with values, talks to other ranks or starts a GPU kernel allocate what it would
allocate on a GPU, and nothing else. A name that is gone raises AttributeError; a test enters every adapter.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def replaced(*names: tuple[str, Any]) -> Iterator[None]:
    """Inside the block each "module:path" is what stands beside it. AttributeError if a name is gone."""
    with ExitStack() as stack:
        for where, new in names:
            owner, name = owner_of(where)
            getattr(owner, name)
            stack.enter_context(patch.object(owner, name, new))
        yield


def owner_of(where: str) -> tuple[Any, str]:
    """The object that holds "module:path", and the last part of the path."""
    module, _, path = where.partition(":")
    *outer, name = path.split(".")
    owner: Any = import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


# torch ------------------------------------------------------------------------------------------------------------


def lists_of_ones() -> AbstractContextManager[None]:
    """`tolist()` of a fake tensor is ones: token ids, masks without padding, counts that divide.

    Why: planning reads ids and masks as lists; torch would ask for the items one by one, thousands of them.
    Remove when: trainers plan without reading tensors back.
    """

    def tolist(self: FakeTensor) -> Any:
        value: Any = 1.0 if self.dtype.is_floating_point else 1
        for size in reversed(self.shape):
            value = [value] * size if not isinstance(value, list) else [value for _ in range(size)]
        return value

    return replaced(("torch._subclasses.fake_tensor:FakeTensor.tolist", tolist))


def modules_cast_in_place() -> AbstractContextManager[None]:
    """`Module.to` sets the data of its parameters.

    Why: torch swaps tensors of subclasses, which fails for fake ones that anything refers to.
    Remove when: `torch.utils.swap_tensors` works on fake tensors with references.
    """

    def apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            for parameter in self._parameters.values():
                # Split by ZeRO-3, it has no elements here.
                if parameter is not None and not (hasattr(parameter, "ds_id") and parameter.numel() == 0):
                    new = fn(parameter)
                    if new.dtype != parameter.dtype:
                        parameter.data = new
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    return replaced(("torch.nn:Module._apply", apply))


def fakes_are_copied() -> AbstractContextManager[None]:
    """`copy.deepcopy` of a fake tensor clones it.

    Why: torch's own copies the storage, which a fake tensor has not; PEFT copies the score head.
    Remove when: FakeTensor has a `__deepcopy__`.
    """

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        new: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
        memo[id(self)] = new
        return new

    return replaced(("torch._subclasses.fake_tensor:FakeTensor.__deepcopy__", deepcopy))


def adam_makes_its_state_only() -> AbstractContextManager[None]:
    """Adam's update does nothing, once its state is made.

    Why: the fused kernel of GPUs needs no memory; what stands in for it on fake tensors does.
    Remove when: `torch._fused_adamw_` takes fake tensors of the CPU.
    """

    def update(params: Any, grads: Any, exp_avgs: Any, *others: Any, **options: Any) -> None:
        return None

    names = ("_single_tensor_adam", "_fused_adam", "_multi_tensor_adam")
    return replaced(*((f"torch.optim.adam:{name}", update) for name in names))


def dropout_of_a_gpu() -> AbstractContextManager[None]:
    """Dropout is the fused kernel, which keeps a mask of one byte a value.

    Why: on a CPU torch multiplies by noise in the input's dtype, and keeps that.
    Remove when: never; the twin asks for the path of another machine.
    """

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    return replaced(("torch.nn.functional:dropout", dropout))


# trl_ext and TRL --------------------------------------------------------------------------------------------------


def rollouts_without_padding(group: int = 1) -> AbstractContextManager[None]:
    """Rows of rollouts are as long as their tensors are wide, have an advantage, and stay; `group` share a prompt.

    Why: a fake tensor has no lengths, and all ranks' rows are alike.
    Remove when: trainers plan without reading tensors back.
    """
    from trl_ext.packing.ragged import Ragged, cumulated
    from trl_ext.trainers.step.rows import RolloutSize
    from trl_ext.trainers.step.unpadded import Unpadded

    def sizes_of(rollouts: dict[str, Any], accelerator: Any = None) -> list[Any]:
        num_ranks = 1 if accelerator is None else accelerator.num_processes
        widths = rollouts["prompt_ids"].size(1), rollouts["completion_ids"].size(1)
        num_rows = len(rollouts["prompt_ids"]) * num_ranks
        return [RolloutSize(row // group, *widths, has_gradient=True) for row in range(num_rows)]

    def redistribute(rollouts: dict[str, Any], rows_of_ranks: Any, accelerator: Any) -> dict[str, Any]:
        num_rows = len(rows_of_ranks[accelerator.process_index])

        def pick(value: torch.Tensor) -> torch.Tensor:  # a group of ranks has more rows than one of them
            return (
                torch.cat([value] * -(-num_rows // len(value)))[:num_rows]
                if num_rows > len(value)
                else value[:num_rows]
            )

        return {
            name: pick(value) if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in rollouts.items()
        }

    def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> Unpadded:
        num_rows, length = input_ids.shape
        rows = np.arange(num_rows)
        tokens = np.repeat(np.stack([2 * (rows // group), 2 * rows + 1], 1), [length - width, width], axis=1)
        sequences = Ragged(tokens.ravel(), cumulated(np.full(num_rows, length)))
        return Unpadded(sequences, np.full(num_rows, width), width)

    where = "trl_ext.trainers"
    return replaced(
        (f"{where}.step.plan:sizes_of", sizes_of),
        (f"{where}.step.plan:redistribute", redistribute),
        (f"{where}.step.exchange:redistribute", redistribute),
        (f"{where}.step.score:unpad", unpad),
        (f"{where}.step.rows:unpad", unpad),
    )


def no_weights_are_sampled() -> AbstractContextManager[None]:
    """The fingerprint of a run holds no sample of weights.

    Why: fake tensors have no values.
    Remove when: never.
    """
    return replaced(("trl_ext.trainers.checkpoints.fingerprint:_sample", lambda name, parameters: {}))


def last_part_of_rows() -> AbstractContextManager[None]:
    """Of a row that ranks share, the simulated one has the last part: of all parts it has the most scored tokens.

    Why: rank 0's part may be of the prompt alone, and rank 0 is the one with most of everything else.
    Remove when: never; the worst of both is asked for.
    """
    from trl_ext.packing.ulysses import SequenceGroup

    of_world = SequenceGroup.of_world

    def last_of_world(size: int, *args: Any, **options: Any) -> SequenceGroup:
        return replace(of_world(size, *args, **options), rank=size - 1)

    return replaced(("trl_ext.packing.ulysses:SequenceGroup.of_world", staticmethod(last_of_world)))


def attention_of_a_gpu() -> AbstractContextManager[None]:
    """Packed attention is torch's varlen kernel, which has a fake version. Its copies of keys are an upper bound:
    where they are more than the row's own, a card merges calls instead (`trl_ext.packing.merge`).

    Why: on a CPU `scaled_dot_product_attention` runs segment by segment and saves other tensors.
    Remove when: never; the twin asks for the choice of another machine.
    """
    from trl_ext.packing.kernels import varlen_attention

    return replaced(("trl_ext.packing.attention:choose_kernel", lambda *where, **how: varlen_attention))


@contextmanager
def head_of_a_gpu() -> Iterator[None]:
    """TRL's fused head takes its Triton path, with kernels that write into what is there already.

    Why: without Triton it scores every position and makes fp32 tiles, several times 512 MiB.
    Remove when: never; the twin asks for the path of another machine.
    """

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *tensors, **options: None

    class Triton:
        cdiv = staticmethod(lambda a, b: -(-a // b))

    head = "trl.kernels.chunked_logprob"
    names = (
        (f"{head}:_use_triton", lambda device: True),
        ("trl.trainer.utils:_use_triton", lambda device: True),
        (f"{head}:_forward_kernel", Kernel()),
        (f"{head}:_backward_kernel", Kernel()),
        (f"{head}:_addmm_fp32", lambda total, a, b: None),
        # Ours would take the narrow tiles of a processor.
        ("trl_ext.trainers.step.score:head_in_cache", lambda device: nullcontext()),
    )
    # TRL imports Triton only where it is installed.
    with replaced(*names), patch.object(import_module(head), "triton", Triton, create=True):
        yield


def reference_from_config(make: Callable[[], Any]) -> AbstractContextManager[None]:
    """TRL's reference model is made from the config.

    Why: TRL loads it again by the model's name, and the twin has no weights.
    Remove when: GRPOTrainer takes a reference model.
    """
    return replaced(("trl.trainer.grpo_trainer:create_model_from_path", lambda *name, **options: make()))


def objects_from_this_rank() -> AbstractContextManager[None]:
    """Gathered objects are this rank's, once for each rank; broadcast ones stay.

    Why: they are pickled into tensors, whose values a fake process group does not carry.
    Remove when: never.
    """

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    return replaced(
        ("torch.distributed:all_gather_object", gather),
        ("torch.distributed:broadcast_object_list", lambda *objects, **options: None),
    )


def gathers_of_any_shape() -> AbstractContextManager[None]:
    """Tensors are flat when they are gathered into one.

    Why: on a card accelerate gathers (n, k) into flat tensors, which NCCL counts and a fake process group broadcasts.
    Remove when: torch's FakeProcessGroup flattens what it is given.
    """
    plain = torch.distributed.all_gather_into_tensor

    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return plain(output_tensor.view(-1), input_tensor.reshape(-1), *args, **options)

    return replaced(("torch.distributed:all_gather_into_tensor", gather))


# DeepSpeed --------------------------------------------------------------------------------------------------------

RANK_CHECKS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")


@contextmanager
def ranks_that_agree() -> Iterator[None]:
    """DeepSpeed does not compare sizes with its other ranks.

    Why: they do not exist, and what a fake process group hands back is no number. Modules import the two functions by
    name, hence the walk.
    Remove when: never.
    """
    with ExitStack() as stack:
        for name in RANK_CHECKS:
            getattr(import_module("deepspeed.runtime.zero.utils"), name)
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("deepspeed") and hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *sizes, **options: None))
        yield


def no_kernel_is_built() -> AbstractContextManager[None]:
    """DeepSpeed does not compile its collectives for CPUs.

    Why: it takes a minute, waits for whoever else is compiling, and nothing is communicated.
    Remove when: never.
    """
    return replaced(("deepspeed.comm.torch:build_shm_op", lambda: None))


@contextmanager
def engine_steps(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Tells when a DeepSpeed engine steps.

    Why: its gradients are cast and copied before the optimizer inside it runs, which torch's hooks see.
    Remove when: DeepSpeed has a hook for it.
    """
    from deepspeed import DeepSpeedEngine

    step = DeepSpeedEngine.step

    def told(self: Any, *args: Any, **options: Any) -> Any:
        begin()
        try:
            return step(self, *args, **options)
        finally:
            end()

    with replaced(("deepspeed:DeepSpeedEngine.step", told)):
        yield
