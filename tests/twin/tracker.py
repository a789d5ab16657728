"""Counts the bytes of all live tensors while a trainer runs on fake ones, and remembers where each phase peaked.

A storage counts once, from the operation that made it until it is freed, in the allocator's units of 512 bytes. What
kernels take besides, cuBLAS's workspace or the accumulators of flash attention's backward, fake tensors do not show.
Operations whose result depends on values, which fake tensors have not, get an answer that a worst case would give.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from tests.twin.driver import TwinPeak

aten = torch.ops.aten
LOAD, UPDATE = "load", "update"
BLOCK_BYTES = 512
_MARK = "trl_ext_module"


class Tracker(TorchDispatchMode):
    """Entered inside a FakeTensorMode.

    Attributes:
        live: Bytes of all tensors now.
        peaks: By phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, TwinPeak] = {}
        self._sizes: dict[int, int] = {}
        self._phases = [LOAD]
        self._modules: list[torch.nn.Module] = []
        self._names: dict[int, str] = {}
        self._backward_module = ""

    # Phases and modules -------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge what happens inside to `name`, phases opened inside excepted."""
        self.open_phase(name)
        try:
            yield
        finally:
            self.close_phase()

    def open_phase(self, name: str) -> None:
        """Charge what happens from here on to `name`."""
        self._phases.append(name)
        self._note("")

    def close_phase(self) -> None:
        """Charge what happens from here on to the phase around the one that was opened last."""
        self._phases.pop()
        self._note("")

    def begin_training(self) -> None:
        """From here on what no phase claims, such as clipping, belongs to the update."""
        self._phases[0] = UPDATE
        self._note("")

    def name_modules(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Remember what the model's modules are called, for the answer."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Inside the block, know which module computes: in forward by hooks, in backward by marks on the graph."""
        hooks = torch.nn.modules.module
        enter = hooks.register_module_forward_pre_hook(lambda module, args: self._modules.append(module))
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        # A ModelOutput is a dict, and its values are what backward comes through.
        values = output.values() if isinstance(output, dict) else output
        for value in values if isinstance(values, Iterable) and not isinstance(values, torch.Tensor) else (values,):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                # torch declares the dictionary `metadata` as a method.
                value.grad_fn.metadata[_MARK] = self._called(module)  # type: ignore[index]

    def _called(self, module: torch.nn.Module) -> str:
        return self._names.get(id(module)) or type(module).__name__

    # Bytes --------------------------------------------------------------------------------------------------------

    def _note(self, op: str) -> None:
        if self.live > self.peaks.setdefault(self._phases[-1], TwinPeak(0, "", "")).num_bytes:
            if torch._C._current_graph_task_id() == -1 or self._modules:
                where = self._called(self._modules[-1]) if self._modules else ""
            else:
                where = f"backward of {self._backward_module}" if self._backward_module else "backward"
            self.peaks[self._phases[-1]] = TwinPeak(self.live, op, where)

    def _count(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.device.type == "meta":  # DeepSpeed keeps meta copies of all weights
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.live += self._sizes[key]
        weakref.finalize(storage, self._free, key)
        self._note(op)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        # DeepSpeed's CPU accelerator says "cpu:0", which fake tensors take for another device than "cpu".
        if device is not None and device.type == "cpu" and device.index is not None:
            kwargs["device"] = torch.device("cpu")
        node: Any = torch._C._current_autograd_node()
        if node is not None and _MARK in node.metadata:
            self._backward_module = node.metadata[_MARK]
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return _scalar(func, args[0])
        except DynamicOutputShapeException:
            result = _everything(func, args)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, str(func))
        return result


def _scalar(func: Any, tensor: torch.Tensor) -> bool | int | float:
    """The answer of `.item()` and its like: 1 for counts, so that nothing is divided by zero, and False for flags
    (DeepSpeed's overflow is a byte)."""
    if func is aten._local_scalar_dense.default:
        if tensor.dtype in (torch.bool, torch.uint8):
            return False
        return 0.0 if tensor.dtype.is_floating_point else 1
    if func is aten.is_nonzero.default:
        return False
    if func is aten.equal.default:
        return True
    raise NotImplementedError(f"the value of {func}")


def _everything(func: Any, args: tuple) -> Any:
    """The result of a selection by a mask, which selects everything: no token is padding in a worst case."""
    if func is aten.nonzero.default:
        return _indices(args[0].numel(), args[0])[:, None].expand(-1, max(args[0].dim(), 1)).contiguous()
    if func is aten.masked_select.default:
        return args[0].new_empty(args[1].numel())
    if func is aten.index.Tensor:
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            indices += [_indices(index.numel(), index) for _ in range(index.dim())] if is_mask else [index]
        return func(args[0], indices)
    raise NotImplementedError(f"the size of {func}")


def _indices(num: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(num, dtype=torch.long, device=like.device)
