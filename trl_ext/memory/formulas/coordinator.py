"""DeepSpeed's rules for gathering ZeRO-3's weights and giving them back, replayed on the visits of its hooks.

Source: DeepSpeed 0.19.8, `PartitionedParameterCoordinator` and `AllGatherCoalescedHandle`. It records the modules of a
pass and from then on fetches ahead: at every module it takes weights from the recorded queue until it has
`stage3_prefetch_bucket_size` of them or `stage3_max_live_parameters` are there, the last one whatever its size. Those
that it fetches at once come through one buffer, from which each weight is copied when the first of them is needed, and
which stands until the last of them is: twice the bytes in between. A module that ends gives back its weights unless
they are needed again within `stage3_max_reuse_distance`, or the queue has already passed over that use.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from trl_ext.memory.formulas.visiting import Visit, Weight


class _Gather:
    """Weights that come together. `left` are those that nobody has waited for; one alone needs no buffer."""

    __slots__ = ("buffer", "is_there", "left", "weights")

    def __init__(self, weights: list[Weight], num: int) -> None:
        self.weights, self.left, self.is_there = weights, len(weights), False
        self.buffer = num if len(weights) > 1 else 0


class Trace:
    """A recorded pass: its modules in order, the queue of their weights, and where each is used."""

    def __init__(self, visits: Iterable[Visit]) -> None:
        self.modules: list[str] = []
        self.queue: list[tuple[Weight, int]] = []
        self.before: list[int] = []  # elements used by the modules before this one
        self.uses: dict[Weight, list[int]] = {}
        num = 0
        for visit in visits:
            if not visit.enters:
                continue
            step = len(self.modules)
            self.modules.append(visit.module)
            self.before.append(num)
            for weight in visit.weights:
                self.queue.append((weight, step))
                self.uses.setdefault(weight, []).append(step)
                num += weight.num

    def distance(self, weight: Weight, step: int) -> float:
        """Elements from a module to the one that next uses the weight."""
        uses = self.uses.get(weight, [])
        place = bisect_left(uses, step)
        return self.before[uses[place]] - self.before[step] if place < len(uses) else float("inf")


class Coordinator:
    """DeepSpeed's, with elements instead of tensors.

    Args:
        bucket, live, reuse: `stage3_prefetch_bucket_size`, `stage3_max_live_parameters`, `stage3_max_reuse_distance`.
        pins: A forward that backward repeats keeps the trained weights that it gives back, because autograd has
            saved them: what checkpoints do that are not reentrant.

    Attributes:
        held: Elements of gathered weights and of buffers that stand.
        left: Of those, when the last pass had ended.
        unpinned: Elements that autograd has let go of in each visit of the last pass.
    """

    def __init__(self, bucket: int, live: int, reuse: int, pins: bool = False) -> None:
        self.bucket, self.live, self.reuse, self.pins = bucket, live, reuse, pins
        self.held = self.left = 0
        self.unpinned: list[int] = []
        self._whole: set[Weight] = set()
        self._on_the_way: dict[Weight, _Gather] = {}
        self._users: dict[Weight, set[str]] = {}
        self._backward: dict[str, set[Weight]] = {}  # by module, the frozen weights that a repeated forward gave it
        self._pinned: dict[Weight, int] = {}
        self._kept: dict[tuple[str, int], list[Weight]] = {}
        self._begin(None)

    def _begin(self, trace: Trace | None) -> None:
        self._trace = trace
        self._queue = deque(trace.queue if trace else ())
        self._seen: dict[Weight, int] = {}
        self._step = self._available = 0

    def run(self, visits: Sequence[Visit], trace: Trace | None) -> list[int]:
        """One pass, fetching ahead as a trace has it until a module comes that is not in it.

        Returns:
            Elements held after each visit. After the pass nothing is.
        """
        self._begin(trace)
        counts = []
        self.unpinned = []
        for visit in visits:
            self.unpinned.append(0)
            self._enter(visit) if visit.enters else self._leave(visit)
            counts.append(self.held)
        self.left = self.held
        self._forget()
        return counts

    def _forget(self) -> None:
        """The optimizer step gives all back."""
        self._backward.clear()
        self._users.clear()
        self._on_the_way.clear()
        self._whole.clear()
        self._pinned.clear()
        self.held = 0

    def _enter(self, visit: Visit) -> None:
        trace = self._trace
        if trace and (self._step >= len(trace.modules) or trace.modules[self._step] != visit.module):
            self._trace = None
            for weight in list(self._on_the_way):
                self._wait(weight)
                self._release(weight)
        if not visit.forward:
            self._backward[visit.module] = set()
        if visit.weights:
            self._fetch(visit.weights)
            for weight in visit.weights:
                self._use(weight, visit)
        if self._trace:
            self._fetch_ahead(visit)
        self._step += 1

    def _use(self, weight: Weight, visit: Visit) -> None:
        users = self._users.setdefault(weight, set())
        users.add(visit.module)
        if visit.again and weight.is_frozen:  # given back when the module whose backward repeats it ends
            owner = next(reversed(self._backward))
            self._backward[owner].add(weight)
            users.add(owner)
        if weight in self._on_the_way:
            self._wait(weight)

    def _fetch_ahead(self, visit: Visit) -> None:
        new = {weight for weight in visit.weights if self._seen.get(weight, -1) < self._step}
        while new:
            weight, step = self._queue.popleft()
            self._seen[weight] = step
            new.discard(weight)
        most, num = min(self.live - self._available, self.bucket), 0
        chosen: dict[Weight, None] = {}
        while self._queue and num < most:
            weight, step = self._queue.popleft()
            self._seen[weight] = max(self._seen.get(weight, -1), step)
            if weight not in self._whole and weight not in self._on_the_way and weight not in chosen:
                chosen[weight] = None
                num += weight.num
        self._fetch(chosen)

    def _fetch(self, weights: Iterable[Weight]) -> None:
        missing = [weight for weight in weights if weight not in self._whole and weight not in self._on_the_way]
        num = sum(weight.num for weight in missing)
        gather = _Gather(missing, num)
        self._available += num
        self.held += num
        self._on_the_way.update(dict.fromkeys(missing, gather))

    def _wait(self, weight: Weight) -> None:
        gather = self._on_the_way.pop(weight)
        gather.left -= 1
        if not gather.is_there:
            gather.is_there = True
            self._whole.update(gather.weights)
            self.held += gather.buffer
        if not gather.left:
            self.held -= gather.buffer

    def _release(self, weight: Weight, is_pinned: bool = False) -> None:
        if weight in self._whole and not self._users.get(weight):
            self._whole.discard(weight)
            self._available -= weight.num
            if is_pinned:
                self._pinned[weight] = weight.num
            else:
                self.held -= weight.num

    def _unpin(self, weights: Iterable[Weight]) -> None:
        self.unpinned[-1] = sum(self._pinned.pop(weight, 0) for weight in weights)
        self.held -= self.unpinned[-1]

    def _leave(self, visit: Visit) -> None:
        repeated = set() if visit.forward else self._backward.pop(visit.module, set())
        if not visit.weights and not repeated:
            return
        free = {*self._not_kept(visit), *repeated}
        for weight in {*visit.weights, *repeated}:
            self._users.setdefault(weight, set()).discard(visit.module)
            if weight in free:
                self._release(weight, is_pinned=self.pins and visit.again and not weight.is_frozen)
        if not visit.forward:
            self._unpin(visit.weights)

    def _not_kept(self, visit: Visit) -> Iterable[Weight]:
        """What a module gives back. DeepSpeed remembers its first answer for a module at its place in the pass, even
        if that came from the trace of a forward alone."""
        if self._trace is None:
            return visit.weights
        key = visit.module, self._step
        if key not in self._kept:
            self._kept[key] = [
                weight
                for weight in visit.weights
                if self._seen.get(weight, -1) <= self._step and self._trace.distance(weight, self._step) >= self.reuse
            ]
        return self._kept[key]
