# SPDX-License-Identifier: Apache-2.0
"""The train engine of a script."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch

from dlrover.python.rl.common.errors import EngineError, SessionError, UnknownMethod
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.base import TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.train_module import check_empty
from dlrover.python.rl.session.engine import HandEngine
from dlrover.python.rl.session.members import TrainMember
from dlrover.python.rl.session.session import SlotRequest, current
from dlrover.python.rl.session.split import MERGES, Merge, Splitter, merge
from dlrover.python.rl.session.weight_sync import SyncReport, Way, sync
from dlrover.python.rl.trainer.shard import Shard

EXECUTORS = ("fsdp2",)
"""What runs a module of the user's own."""

_SHARED = {"train", "eval"}  # The engine's call the module's.
_TAKEN = {"close"}  # It belongs to the process.


class TrainEngine(HandEngine):
    """Trains a module of the user's, whose public methods it has as its own.

    ``engine.train_step(NeedParallel(rows), lr)`` calls ``train_step`` on every rank: each model replica gets its part
    of what is wrapped, and all of the rest. One result of each replica comes back, in order, unless ``merge`` says
    otherwise: :func:`~dlrover.python.rl.session.split.merge`.

    Args:
        module: a :class:`~dlrover.python.rl.engine.model.train_module.TrainModule` without weights.
        executor: ``"fsdp2"``.
        merge: what results are merged to by default.
        name: what messages call it; ``TRAIN_1`` and so on by default.

    Raises:
        EngineError: the module has weights already, or nothing runs modules under this name.
    """

    _kind = "TRAIN"

    def __init__(self, module: Any, executor: str = "fsdp2", *, merge: Merge = "list", name: str | None = None) -> None:
        super().__init__(name)
        if executor not in EXECUTORS:
            raise EngineError(
                f"'{executor}' does not run modules{hint(executor, EXECUTORS)}; deepspeed and megatron train models of"
                " jobs, by the losses that they are handed"
            )
        check_empty(module)
        hidden = set(methods_of(type(module))) & (set(dir(TrainEngine)) - _SHARED | _TAKEN)
        if hidden:
            raise EngineError(
                f"{type(module).__name__} has methods that the engine has itself: rename {', '.join(sorted(hidden))}"
            )
        self._class, self._merge = type(module), _check_merge(merge)
        self._payload = cloudpickle.dumps(module)
        self._parallel = ParallelSizes()

    def build(  # noqa: PLR0913 - the options of a placement, all of them optional
        self,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        shards: int | None = None,
        colocate_with: Any = None,
        not_colocate_with: Any = None,
        nodes: Sequence[str] | None = None,
        precision: Literal["fp32", "bf16"] | None = None,
        ignore_rebuild_error: bool = False,
    ) -> "TrainEngine":
        """Start a process for each slot, and give each its part of the module with its weights.

        The ranks are ``data_parallel_size`` replicas of ``context_parallel_size * tensor_parallel_size``, which have
        ``data_parallel_size / shards`` copies of the parameters between them. What is not given fills the slots there
        are: by default one copy is sharded over all of them.

        Args:
            tensor_parallel_size: ranks that split each matrix, and get the same rows.
            context_parallel_size: ranks that share the sequences of the same rows, where a call divides them
                (``NeedParallel(x, type="seq")``); they shard the parameters, too. Hugging Face models only.
            data_parallel_size: model replicas, each with rows of its own: what ``NeedParallel`` divides by.
            shards: replicas that share out one copy of the parameters, gradients and optimizer (ZeRO-3); all of them by
                default. Copies stay equal.
            colocate_with, not_colocate_with, nodes, ignore_rebuild_error: as in ``InferenceEngine.build``.
            precision: of the forward and backward pass; parameters and their optimizer are float32. By default
                ``"bf16"`` on CUDA.

        Returns:
            The engine.

        Raises:
            SessionError: it is built already, or the slots are not there; nothing was started.
            InvocationError: a rank could not be made; none is left.
        """
        if not self._should_build(ignore_rebuild_error):
            return self
        request = SlotRequest.near(colocate_with, not_colocate_with, nodes)
        free = len(current().table.candidates(request))
        groups, size = train_sizes(free, tensor_parallel_size, context_parallel_size, data_parallel_size, shards)
        self._parallel = ParallelSizes(
            ddp_size=groups,
            tensor_parallel_size=tensor_parallel_size,
            context_parallel_size=context_parallel_size,
        )
        argument_sets = groups * size // tensor_parallel_size
        kind = self._start(replace(request, group=size, groups=groups), TrainMember, argument_sets)
        precision = precision or ("bf16" if kind == "cuda" else "fp32")
        self._open(TrainSettings(device=kind, precision=precision, parallel=self._parallel), self._payload)
        return self

    @property
    def replicas(self) -> int:
        """Model replicas, each with rows of its own: the divisor of ``NeedParallel``."""
        return len(self._running("replicas").slots) // self._parallel.replica_size

    def __getattr__(self, name: str) -> "ModuleMethod":
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        if not callable(getattr(self._class, name, None)):
            raise UnknownMethod(f"{self._class.__name__} has no method '{name}'{hint(name, methods_of(self._class))}")
        return ModuleMethod(self, name, self._merge)

    def __dir__(self) -> list[str]:
        return sorted([*object.__dir__(self), *methods_of(self._class)])

    def _call(self, method: "ModuleMethod", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sizes = self._parallel
        splitter = Splitter(self.replicas, sizes.context_parallel_size, f"{self.name}.{method.name}")
        values, named = splitter.arrange(args, kwargs)
        refs = self._submit(method.name, *values, Shard(splitter.shares), splitter.split, **named)
        results = self._gather(refs, method.timeout_s)[:: sizes.tensor_parallel_size]
        stride = 1 if splitter.shares[0].sequences else sizes.context_parallel_size
        return merge(results[::stride], splitter.shares[::stride], method.merge)

    def train(self, mode: bool = True) -> None:
        """Put the module into training mode on every rank, as it is after ``build``."""
        self._ask("engine.train", mode)

    def eval(self) -> None:
        """Put the module into evaluation mode on every rank: dropout is off."""
        self._ask("engine.train", False)

    @property
    def training(self) -> bool:
        return bool(self._ask("engine.in_training")[0])

    def p2p_weight_sync(
        self,
        other: HandEngine,
        timeout_s: float = 600.0,
        *,
        way: Way | None = None,
        folder: str | Path | None = None,
    ) -> SyncReport:
        """Send the weights to another engine, process to process: :func:`~dlrover.python.rl.session.weight_sync.sync`.

        Args:
            other: an inference engine, or a train engine whose module has no optimizer (a reference).
            timeout_s: for all of it.
            way: ``"device memory"``, ``"shared memory"``, ``"broadcast"`` or ``"disk"``; None for ``"disk"`` if there
                is a folder, else for the shortest.
            folder: for ``"disk"``: one that both engines' nodes see.
        """
        return sync(self, other, timeout_s, way, folder)

    def save(self, path: str | Path) -> None:
        """Write what the module exports, a Hugging Face model in its format, whole or not at all; rank 0 writes."""
        self._ask("engine.save", Path(path).absolute())

    def state_dict(self) -> dict[str, Any]:
        """What the module exports, by name, in this process: for a look, not for weight sync."""
        weights = self._ask("engine.publish")[0]
        return {name: torch.clone(weights.tensor(name)) for name in weights.buffers}


@dataclass(frozen=True)
class ModuleMethod:
    engine: TrainEngine
    name: str
    merge: Merge
    timeout_s: float | None = None

    def options(self, *, merge: Merge | None = None, timeout_s: float | None = None) -> "ModuleMethod":
        """The same method with another ``merge`` or a time limit for all ranks (None waits, and logs late ranks)."""
        return replace(self, merge=_check_merge(merge or self.merge), timeout_s=timeout_s or self.timeout_s)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine._call(self, args, kwargs)


def train_sizes(free: int, tensor: int, context: int, replicas: int | None, shards: int | None) -> tuple[int, int]:
    """Fill in the sizes of a train engine that were not given (``replicas``: as many as fit; ``shards``: all of them).
    Returns the number of groups with a copy of the parameters each, and the slots of one group."""
    sizes = {
        "tensor_parallel_size": tensor,
        "context_parallel_size": context,
        "data_parallel_size": replicas,
        "shards": shards,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise SessionError(f"{name} is {size}: it must be positive")
    replica = tensor * context
    if replicas is None:
        replicas = free // replica
        replicas -= replicas % (shards or 1)
    if not replicas:
        requested = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
        raise SessionError(f"{free} free slots are too few for one group: {requested}")
    shards = shards or replicas
    if replicas % shards:
        raise SessionError(f"data_parallel_size {replicas} is no multiple of shards {shards}")
    return replicas // shards, shards * replica


def methods_of(cls: type) -> list[str]:
    """The public methods that a module's class adds to torch's modules and the library's models."""
    library = ("torch.", "transformers.")
    own = {name for base in cls.__mro__ if not base.__module__.startswith(library) for name in vars(base)}
    return sorted(name for name in own if not name.startswith("_") and callable(getattr(cls, name, None)))


def _check_merge(how: Merge) -> Merge:
    if how not in MERGES:
        raise SessionError(f"results cannot be merged as '{how}'{hint(how, MERGES)}")
    return how
