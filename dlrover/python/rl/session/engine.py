# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: an engine and its two kinds, most of it the documentation that users read.
"""The engines of a script, each a role group on slots: one kind trains a module of the user, the other generates
completions."""

import dataclasses
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch

from dlrover.python.rl.common.errors import (
    EngineError,
    InvocationError,
    InvocationTimeout,
    SessionError,
    UnknownMethod,
    WeightSyncError,
    WorkloadDied,
)
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import even_cuts
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams, TrainSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info, engine_place, validate_engine
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.api.weights import Part
from dlrover.python.rl.engine.model.train_module import check_empty
from dlrover.python.rl.session.members import (
    InferenceMember,
    RequestOutput,
    TrainMember,
    as_outputs,
    as_prompts,
    as_sampling,
)
from dlrover.python.rl.session.session import Members, Session, SlotRequest, current
from dlrover.python.rl.session.split import MERGES, Merge, merge, split_arguments
from dlrover.python.rl.session.weight_sync import SyncReport, Way, choose_route
from dlrover.python.rl.trainer.port import Pending, Ref
from dlrover.python.rl.trainer.role_group import Invocation
from dlrover.python.rl.trainer.shard import Shard
from dlrover.python.rl.trainer.workload import DEFAULT_OPTIONS

_SETTLE_S = 5.0
"""Limit on a call's wait for ranks that still run a call which failed on another rank."""

_SUBMIT = DEFAULT_OPTIONS.replace(blocking=False, auto_shard=False)


class HandEngine:
    """An engine of a script, which runs from ``build`` to :meth:`release`."""

    _kind = "ENGINE"
    _session: Session

    def __init__(self, name: str | None) -> None:
        self.name = (name or self._kind).upper()
        self._requested_name = name
        self._members: Members | None = None
        self._failed: list[Ref] = []

    @property
    def built(self) -> bool:
        return self._members is not None

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(slot for slots in self._running("slots").slots for slot in slots)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return self._running("groups").groups

    def _should_build(self, ignore_rebuild_error: bool) -> bool:
        if self._members is not None and not ignore_rebuild_error:
            raise SessionError(f"{self.name} is built already, on slots {list(self.slots)}: release() it first")
        return self._members is None

    def _start(self, request: SlotRequest, workload: type, replicas: int | None = None) -> str:
        """Start the workers and return the kind of their devices."""
        session = current()
        members = session.start(self, request, workload, replicas)
        self.name, self._members, self._session = members.name, members, session
        return session.slots[members.slots[0][0]].kind

    def _open(self, *arguments: Any) -> None:
        """Construct the engine in each process; after a failure no process is left."""
        try:
            self._call("engine.open", *arguments)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the processes and free the slots; ``build`` starts the engine again. Safe to repeat."""
        members, self._members, self._failed = self._members, None, []
        if members is not None:
            self._session.end(members)

    def _running(self, use: str) -> Members:
        if self._members is None:
            raise SessionError(f"{self.name} is not built: call build() before {use}")
        return self._members

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> list[Ref]:
        """Submit a call to every rank; only a ``Shard`` is divided."""
        group = self._running(method).role_group
        deadline_s = time.monotonic() + _SETTLE_S
        while self._failed:
            outcomes = self._failed[0].port.wait(self._failed, max(0.0, deadline_s - time.monotonic()))
            late = [ref for ref, outcome in zip(self._failed, outcomes, strict=True) if outcome.late]
            if len(late) == len(self._failed):
                break
            self._failed = late  # a failed rank ends the wait for the other ranks
        if self._failed:  # the messages of both calls' collectives would mix
            ranks, before = ", ".join(str(ref.rank) for ref in self._failed), self._failed[0].method
            raise SessionError(
                f"{self.name} cannot call {method}: {before} has failed, and still runs on ranks {ranks}; wait until"
                " they give up, or release() the engine and build() it again"
            )
        pending: Pending = Invocation(group, method, _SUBMIT)(*args, **kwargs)
        return pending.refs

    def _gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """Return the results of one call to all ranks. After a failure the next call waits for the other
        ranks, and is refused if they have not ended."""
        try:
            return self._session.gather(refs, timeout_s)
        except (InvocationTimeout, WorkloadDied):
            raise  # all ranks are in the same call, or one is lost and the next call fails, too
        except InvocationError:
            self._failed = list(refs)
            raise

    def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._gather(self._submit(method, *args), timeout_s)

    def cpu(self) -> None:
        """Move the tensors to host memory and free the devices; a key-value cache is dropped."""
        self._call("engine.cpu")

    def cuda(self, *parts: Part) -> None:
        """Bring the tensors back to the devices: all, or only ``"weights"`` or ``"kv_cache"``."""
        for part in parts or ("all",):
            self._call("engine.cuda", part)

    def meta(self) -> None:
        """Release all tensors, on devices and hosts. New weights bring the engine back: ``cuda()``, then a sync."""
        self._call("engine.meta")

    def device(self) -> str | list[str]:
        """Return the place of the weights, or a list if ranks differ: ``"cpu"``, ``"meta"``, or ``"cuda"``, even where
        the host stands in for a device."""
        devices = [str(device) for device in self._call("engine.place")]
        return devices[0] if len(set(devices)) == 1 else devices

    def footprint(self) -> list[dict[str, int]]:
        """Bytes on the device by kind, for each rank."""
        return self._call("engine.footprint")

    def release_memory_cache(self) -> None:
        """Free the memory that the allocators cache on the devices."""
        self._call("engine.release_cache")


EXECUTORS = ("fsdp2",)
"""The classes that run a module of the user."""

_SHARED = {"train", "eval"}  # the engine's methods call the module's
_TAKEN = {"close"}  # the worker's own


class TrainEngine(HandEngine):
    """Trains a module of the user, and has the module's public methods.

    ``engine.train_step(NeedParallel(rows), lr)`` calls ``train_step`` on every rank: each model replica gets its part
    of a wrapped argument, and other arguments whole. By default the call returns one result of each replica, in order;
    ``merge`` names other ways: :func:`~dlrover.python.rl.session.split.merge`.

    Args:
        module: a :class:`~dlrover.python.rl.engine.model.train_module.TrainModule` without weights.
        executor: ``"fsdp2"``.
        merge: how results are merged by default.
        name: the engine's name in messages; ``TRAIN_1`` and so on by default.

    Raises:
        EngineError: the module has weights already, or ``executor`` does not run modules.
    """

    _kind = "TRAIN"

    def __init__(self, module: Any, executor: str = "fsdp2", *, merge: Merge = "list", name: str | None = None) -> None:
        super().__init__(name)
        if executor not in EXECUTORS:
            raise EngineError(f"'{executor}' does not run modules{hint(executor, EXECUTORS)}")
        check_empty(module)
        if hidden := set(methods_of(type(module))) & (set(dir(TrainEngine)) - _SHARED | _TAKEN):
            names = ", ".join(sorted(hidden))
            raise EngineError(f"{type(module).__name__} has methods that the engine has itself: rename {names}")
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
        """Start a process for each slot, with its part of the module and the weights, and return the engine.

        The ranks are ``data_parallel_size`` replicas of ``context_parallel_size * tensor_parallel_size`` ranks, which
        together have ``data_parallel_size / shards`` copies of the parameters. By default all free slots share one.

        Args:
            tensor_parallel_size: ranks that split each matrix, and get the same rows.
            context_parallel_size: ranks that share the sequences of the same rows, if a call divides them
                (``NeedParallel(x, type="seq")``); they shard the parameters, too. Hugging Face models only.
            data_parallel_size: model replicas, over which ``NeedParallel`` divides the rows.
            shards: replicas that share one copy of the parameters, gradients and optimizer (ZeRO-3), by default all.
            colocate_with, not_colocate_with, nodes, ignore_rebuild_error: as in ``InferenceEngine.build``.
            precision: of the forward and backward pass; parameters and optimizer are float32. By default ``"bf16"`` on
                CUDA.

        Raises:
            SessionError: it is built already, or too few slots are free; nothing was started.
            InvocationError: a rank failed; none is left.
        """
        if not self._should_build(ignore_rebuild_error):
            return self
        request = SlotRequest.near(colocate_with, not_colocate_with, nodes)
        free = len(current().table.candidates(request))
        groups, size = train_sizes(free, tensor_parallel_size, context_parallel_size, data_parallel_size, shards)
        self._parallel = ParallelSizes(
            ddp_size=groups, tensor_parallel_size=tensor_parallel_size, context_parallel_size=context_parallel_size
        )
        argument_sets = groups * size // tensor_parallel_size
        kind = self._start(replace(request, group=size, groups=groups), TrainMember, argument_sets)
        precision = precision or ("bf16" if kind == "cuda" else "fp32")
        self._open(TrainSettings(device=kind, precision=precision, parallel=self._parallel), self._payload)
        return self

    @property
    def replicas(self) -> int:
        """The number of model replicas, over which ``NeedParallel`` divides the rows."""
        return len(self._running("replicas").slots) // self._parallel.replica_size

    def __getattr__(self, name: str) -> "ModuleMethod":
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        if not callable(getattr(self._class, name, None)):
            raise UnknownMethod(f"{self._class.__name__} has no method '{name}'{hint(name, methods_of(self._class))}")
        return ModuleMethod(self, name, self._merge)

    def __dir__(self) -> list[str]:
        return sorted([*object.__dir__(self), *methods_of(self._class)])

    def train(self, mode: bool = True) -> None:
        """Put the module into training mode, in which ``build`` leaves it, on every rank."""
        self._call("engine.train", mode)

    def eval(self) -> None:
        """Put the module into evaluation mode on every rank."""
        self._call("engine.train", False)

    @property
    def training(self) -> bool:
        return bool(self._call("engine.in_training")[0])

    def p2p_weight_sync(
        self,
        other: HandEngine,
        timeout_s: float = 600.0,
        *,
        way: Way | None = None,
    ) -> SyncReport:
        """Send the weights of all ranks to every rank of another engine, process to process.

        Args:
            other: an inference engine, or a train engine whose module has no optimizer (a reference).
            timeout_s: limit on the whole sync.
            way: ``"device memory"``, ``"shared memory"`` or ``"broadcast"``; None: the shortest.

        Raises:
            SessionError: this way is not possible, with the reason.
            WeightSyncError: names, shapes or bytes differ (or an InvocationError with that cause); the receiver keeps
                its old weights.
        """
        source, target = self._running("a weight sync"), other._running("a weight sync")
        session = self._session
        route = choose_route(source, target, session, way)
        ticket = self._call("engine.offer", route, timeout_s=timeout_s)[0]
        sends = self._submit("engine.send", ticket, route)
        takes = other._submit("engine.take", ticket, route)
        stamps = session.gather([*sends, *takes], timeout_s)
        stamp, received = stamps[0], stamps[len(sends) :]
        if set(received) != {stamp}:
            ranks = "; ".join(f"{other.name}[{rank}] {weights}" for rank, weights in enumerate(received))
            raise WeightSyncError(f"{other.name} has other weights than {self.name} sent, {stamp}: {ranks}")
        return SyncReport(stamp, route.way)

    def save(self, path: str | Path) -> None:
        """Write the module's exported weights atomically, a Hugging Face model in its format; rank 0 writes."""
        self._call("engine.save", Path(path).absolute())

    def state_dict(self) -> dict[str, Any]:
        """Return the module's exported weights by name, in this process: for inspection, not for weight sync."""
        weights = self._call("engine.publish")[0]
        return {name: torch.clone(weights.tensor(name)) for name in weights.buffers}


@dataclass(frozen=True)
class ModuleMethod:
    engine: TrainEngine
    name: str
    merge: Merge
    timeout_s: float | None = None

    def options(self, *, merge: Merge | None = None, timeout_s: float | None = None) -> "ModuleMethod":
        """Return the method with another ``merge`` or a time limit on all ranks (None waits, and logs late ranks)."""
        return replace(self, merge=_check_merge(merge or self.merge), timeout_s=timeout_s or self.timeout_s)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine, sizes = self.engine, self.engine._parallel
        label, context = f"{engine.name}.{self.name}", sizes.context_parallel_size
        values, named, shares, split = split_arguments(args, kwargs, engine.replicas, context, label)
        refs = engine._submit(self.name, *values, Shard(shares), split, **named)
        results = engine._gather(refs, self.timeout_s)[:: sizes.tensor_parallel_size]
        stride = 1 if shares[0].sequences else context
        return merge(results[::stride], shares[::stride], self.merge)


def train_sizes(free: int, tensor: int, context: int, replicas: int | None, shards: int | None) -> tuple[int, int]:
    """Complete the sizes of a train engine (None for ``replicas``: as many as fit; for ``shards``: all replicas), and
    return the number of groups with a copy of the parameters each, and the slots of one group."""
    names = "tensor_parallel_size", "context_parallel_size", "data_parallel_size", "shards"
    sizes = dict(zip(names, (tensor, context, replicas, shards), strict=True))
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
    """Return the public methods that a module's class adds to torch's and transformers' classes."""
    library = ("torch.", "transformers.")
    own = {name for base in cls.__mro__ if not base.__module__.startswith(library) for name in vars(base)}
    return sorted(name for name in own if not name.startswith("_") and callable(getattr(cls, name, None)))


def _check_merge(merge: Merge) -> Merge:
    if merge not in MERGES:
        raise SessionError(f"unknown merge '{merge}'{hint(merge, MERGES)}")
    return merge


ALIASES = {"hf": "torch"}
"""Other names of executors."""


class InferenceEngine(HandEngine):
    """Generates completions.

    Args:
        model: folder or hub name of a causal language model.
        executor: ``"torch"`` (or ``"hf"``), ``"vllm"``, ``"sglang"``, an entry point of the group
            ``dlrover_rl.rollout_engines``, ``"module:Class"``, or a class with the methods of
            :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.
        name: the engine's name in messages; ``INFERENCE_1`` and so on by default.

    Raises:
        EngineError: no executor has this name; names the nearest.
        MissingExtra: the executor's package is not installed.
    """

    _kind = "INFERENCE"

    def __init__(self, model: str | Path, executor: str | type = "torch", name: str | None = None) -> None:
        super().__init__(name)
        self.model = str(Path(model).absolute()) if Path(model).is_dir() else model  # workers run in other folders
        self._executor: Any = executor
        self._registered = ALIASES.get(executor, executor) if isinstance(executor, str) else None
        if self._registered is not None:
            self._executor = engine_place(ROLLOUT_ENGINES, self._registered)
        self._calls = 0

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        colocate_with: Any = None,
        not_colocate_with: Any = None,
        nodes: Sequence[str] | None = None,
        ignore_rebuild_error: bool = False,
        **settings: Any,
    ) -> "InferenceEngine":
        """Start the processes, load the model, and return the engine.

        Args:
            tensor_parallel_size: slots of one node over which each copy of the model is split.
            data_parallel_size: model replicas, which share the prompts; by default as many as fit.
            colocate_with: an engine or a list of engines, all of whose slots are used; by default free slots.
            not_colocate_with: an engine or a list of engines whose slots are not used.
            nodes: addresses or ids of the nodes to use.
            ignore_rebuild_error: do nothing if the engine is built already.
            settings: fields of ``RolloutSettings`` (``max_batch=64``) and options of the backend. On CUDA the precision
                is ``"bf16"`` by default.

        Raises:
            EngineError: an option or its value is wrong; nothing was started.
            SessionError: it is built already, or too few slots are free; nothing was started.
            InvocationError: a process could not load the model; none is left.
        """
        if not self._should_build(ignore_rebuild_error):
            return self
        fields = {field.name for field in dataclasses.fields(RolloutSettings)} - {"device", "tensor_parallel_size"}
        own = {name: settings.pop(name) for name in fields & settings.keys()}
        options = engine_info(ROLLOUT_ENGINES, self._registered).options if self._registered else None
        if options is not None:
            option_names = {field.name for field in dataclasses.fields(options)}
            names = {*option_names, *fields, *inspect.signature(self.build).parameters} - {"settings"}
            for name in settings.keys() - option_names:
                raise EngineError(f"build() has no argument '{name}'{hint(name, names)}")
        backend = {**own.pop("backend", {}), **settings}
        if self._registered and (errors := validate_engine(ROLLOUT_ENGINES, self._registered, backend, "backend")):
            raise EngineError("; ".join(map(str, errors)))
        request = SlotRequest.near(colocate_with, not_colocate_with, nodes)
        request = replace(request, group=tensor_parallel_size, groups=data_parallel_size, one_node=True)
        kind = self._start(request, InferenceMember)
        # A script's training computes log-probs over all ids of the model, unless it masks some itself.
        own = {"precision": "bf16" if kind == "cuda" else "fp32", "mask_unknown_ids": False, **own}
        complete = RolloutSettings(device=kind, tensor_parallel_size=tensor_parallel_size, backend=backend, **own)
        self._open(self._executor, self.model, complete)
        return self

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, a contiguous share of them in each group, and return an output for each, in order.

        Args:
            prompts: texts, lists of token ids, or dicts with ``prompt`` or ``prompt_token_ids`` and further entries
                that the engine accepts; or a single prompt.
            sampling_params: a dict has the fields of :class:`~dlrover.python.rl.engine.api.base.SamplingParams`.
            seed: the same seed gives the same completions of the same prompts with any number of groups. By default
                each call samples different ones.
            timeout_s: limit on the call; None waits, and logs the late ranks.

        Raises:
            EngineError: a prompt or parameter is wrong; nothing was generated.
            InvocationError: a group failed or is late.
        """
        groups = len(self._running("generate").slots)
        rows, sampling = as_prompts(prompts), as_sampling(sampling_params)
        self._calls += 1
        seeds = (0, self._calls) if seed is None else (1, seed)
        cuts = even_cuts(len(rows), groups)
        parts = [(start, rows[start:stop]) for start, stop in pairwise(cuts)]
        refs = self._submit("engine.generate", Shard(parts), sampling, seeds)
        batches = self._session.gather(refs, timeout_s)
        shares = [as_outputs(part, start, batch) for (start, part), batch in zip(parts, batches, strict=True) if part]
        return list(chain.from_iterable(shares))
