# SPDX-License-Identifier: Apache-2.0
"""The shared part of the ready workloads: how an engine is made, where it runs, and how rows become optimizer steps.

Roles that share a device have it one at a time, each for one call; between its calls an engine's tensors are in host
memory::

    ACTOR    [lock | cuda() | update | cpu() | release]
    ROLLOUT                                            [lock | cuda() | generate | cpu() | release]

The kernel releases the lock of a member that dies.

There is no deadlock: members that share one device share all their devices (a bundle of the placement, or the device of
their local rank), and each locks them in the same order. Ranks of one role that meet in collectives may wait inside
their locks for each other; only the actor does, and no two such roles of one group may be called at the same time.
"""

import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.errors import RowsDiffer
from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.batch import Batch, Column, Ragged
from dlrover.python.rl.engine.api.base import (
    BaseTrainEngine,
    LoraSettings,
    OptimizerConfig,
    Rendezvous,
    TrainSettings,
    UpdateResult,
)
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.model.ranks import get_random_state, seed_random, set_random_state
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.weight_sync.transports import check_collocation, make_transport
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root
from dlrover.python.rl.runtime.checkpoint.run_files import local_folder
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

TRAINED = ("tokens", "action_mask")

_PATIENCE_S = 5.0
"""A receiver of weights asks the role again after a sender was silent for this long."""


def device_of(workload: BaseWorkload, engine: EngineConfig) -> str:
    """The torch device of a member; for ``cuda`` the first device reserved for it, or that of its local rank."""
    engine = engine.resolve(torch.cuda.is_available())
    if engine.device != "cuda":
        return engine.device
    return f"cuda:{workload.devices[0] if workload.devices else workload.local_rank}"


def train_settings(engine: EngineConfig, device: str, parallel: ParallelSizes) -> TrainSettings:
    return TrainSettings(
        device,
        engine.dtype,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
        gradient_checkpointing=engine.gradient_checkpointing,
        parallel=parallel,
        save_dtype=engine.save_dtype,
        backend=engine.train_options,
    )


def use_threads(count: int | None) -> None:
    if count is not None:
        torch.set_num_threads(count)


F = TypeVar("F", bound=Callable[..., Any])

_LONGEST_TURN_S = 3600.0
"""How long a call waits for the device; a member that hangs with it is found long before, by its own limit."""


class EngineWorkload(BaseWorkload):
    """A workload with one engine, ``self._engine``, which locks its device where several roles share it."""

    takes_turns: ClassVar[bool | None] = None
    """True: members that share a device have it one at a time. None: if the device is an accelerator; processes that
    share a host's cores need not."""

    warmup: ClassVar[str] = "warm_reference"
    """The function of ``recipe.base.warmup`` that warms a standby up."""

    _engine: Any = None
    _transport: WeightTransport | None = None
    _device_locks: tuple[DeviceLock, ...] = ()
    _memory: DeviceMemory | None = None

    @classmethod
    def warm_up(cls) -> None:
        # Imported on demand: only standbys need the classes that it loads.
        getattr(importlib.import_module("dlrover.python.rl.recipe.base.warmup"), cls.warmup)()

    @trainer_invocation(target="RANK0", changes_state=False)
    def vocabulary(self) -> str:
        """Equal for models whose tokenizers give every token the same id."""
        vocabulary = json.dumps(sorted(self._engine.tokenizer.get_vocab().items()))
        return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]

    @contextmanager
    def _first_turn(self, device: str) -> Iterator[DeviceMemory | None]:
        """Lock ``device`` for the first time, to make the engine; yields the memory accounting of a shared device."""
        takes_turns = torch.device(device).type != "cpu" if self.takes_turns is None else self.takes_turns
        if not (takes_turns and self.get_device_collocation() and self.name):
            yield None
            return
        folder, owner = memory_root(*run_of(self.name)) / "devices", f"{self.role}[{self.rank}]"
        self._memory = memory = DeviceMemory(device)
        names = {physical_device(device), *(physical_device(f"cuda:{number}") for number in self.devices)}
        # All processes lock devices in the same order, so no two wait for each other.
        self._device_locks = tuple(DeviceLock(folder / name, owner, memory) for name in sorted(names))
        with self._turn():
            yield memory

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lock the device inside the block, with the engine on it."""
        if not self._device_locks:
            yield
            return
        with self._bare_turn():
            try:
                if self._engine is not None:
                    self._engine.cuda()
                yield
            finally:
                if self._engine is not None:
                    self._engine.cpu()

    @contextmanager
    def _bare_turn(self) -> Iterator[None]:
        """Like :meth:`_turn`, but the engine moves tensors to the device one at a time, where ranks join them."""
        with ExitStack() as stack:
            for lock in self._device_locks:
                stack.enter_context(lock.acquired(_LONGEST_TURN_S))
            try:
                yield
            finally:
                if self._memory is not None:
                    self._memory.release_cache()

    def _make_train_engine(
        self,
        model: str,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None = None,
        rendezvous: Rendezvous = Rendezvous(),  # noqa: B008 - frozen
        **changes: Any,
    ) -> None:
        """Make ``self._engine``, of this member alone unless ``changes`` of its settings name other sizes."""
        engine = engine.resolve(torch.cuda.is_available())
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings = replace(train_settings(engine, device, ParallelSizes()), **changes)
        make = engine_class(TRAIN_ENGINES, engine.train)  # the import takes seconds: not while it holds the device
        with self._first_turn(device) as memory:
            self._engine = make(model, optimizer, settings, rendezvous, memory)

    def _make_weight_transport(self, engine: EngineConfig, device: str, is_leader: bool = False) -> WeightTransport:
        """This member's side of ``engine.weight_sync``, between the actor and the rollouts."""
        check_collocation(engine.weight_sync, device, bool(self.get_device_collocation()))
        settings = SyncSettings(
            f"{self.role}[{self.rank}]",
            is_leader=is_leader,
            address=self.torch_master_addr or "127.0.0.1",
            folder=memory_root(*run_of(self.name)) / "weights" if "/" in self.name else None,
            channel="ACTOR",
            timeout_s=_PATIENCE_S,
            device=device,
        )
        self._transport = transport = make_transport(engine.weight_sync, engine.weight_sync_options, settings)
        return transport

    def close(self) -> None:
        """Release everything: the process may go on with another object of this class."""
        with ExitStack() as stack:
            for lock in self._device_locks:
                stack.callback(lock.close)
            if self._engine is not None:
                stack.callback(self._engine.close)
            stack.callback(self._finish)
            if self._transport is not None:
                stack.callback(self._transport.close)

    def _finish(self) -> None:
        """Wait for what still uses the engine. Raises EngineError if it does not end."""


def on_device(method: F) -> F:
    """Decorator of a method of an :class:`EngineWorkload` that needs the engine on its device."""

    @functools.wraps(method)
    def in_turn(self: EngineWorkload, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def physical_device(device: str) -> str:
    """The node's name of ``device``, ``"cuda-3"``, independent of the devices that a process can see."""
    local = torch.device(device)
    index = str(local.index or 0)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return f"{local.type}-{visible[int(index)] if local.type == 'cuda' and int(index) < len(visible) else index}"


class TrainedWorkload(EngineWorkload):
    """Several members divide the rows, and the model by ``engine.parallel``. Every rank saves its own state (12 bytes
    per parameter of a copy) and recovers from it, without a collective that another failure could break."""

    needs_own_process = True

    head: ClassVar[Head] = "causal"
    """Kind of the model's outputs."""

    head_bias: ClassVar[bool] = True
    """Whether a token head has a bias."""

    warmup = "warm_actor"
    _engine: BaseTrainEngine

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Members with different rows: without those that split a matrix, a sequence or the layers."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return world_size // (engine.parallel or ParallelSizes()).replica_size

    @classmethod
    def keeps_process(cls, config: Any) -> bool:
        """With FSDP2 on CPUs. Other engines have global state, and nccl does not tell of a lost rank."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return engine.train == "fsdp2" and engine.device == "cpu"

    def _load(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, seed: int, lora: LoraSettings | None = None
    ) -> None:
        rendezvous = Rendezvous(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        # On a CPU each member holds the whole model where the engine can: it recovers without the others.
        copies = engine.train == "fsdp2" and torch.device(device_of(self, engine)).type == "cpu"
        sizes = engine.parallel or ParallelSizes(ddp_size=self.world_size if copies else 1)
        heads = {"head": self.head, "head_bias": self.head_bias}
        self._make_train_engine(model, engine, optimizer, rendezvous, parallel=sizes, lora=lora, **heads)
        seed_random(seed, self.role, self.rank)

    @trainer_invocation(changes_state=False)
    def save(self, path: Path) -> None:
        """Write the model in Hugging Face format (rank 0 does); waits for space on a full disk."""
        retry_io(lambda: self._save(path), path)

    def _save(self, path: Path) -> None:
        with local_folder(path) as folder, self._bare_turn():  # not while it waits for space
            self._engine.save(folder)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, version and random states: later steps depend on nothing else, bit for bit."""
        return {"engine": self._engine.state_dict(), "random": get_random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state["engine"])
        set_random_state(state["random"])


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's rows, sampled at ``temperature``, are trained on.

    A row's column ``update`` is the number of its optimizer step within a pass, from 0; without that column all rows
    are in one. ``dtypes`` are those of the columns that further roles compute."""

    temperature: float
    updates: int = 1
    epochs: int = 1
    dtypes: Mapping[str, str] = field(default_factory=dict)


def assign_updates(rows: Batch, updates: int) -> tuple[Batch, int]:
    """Add ``update`` (int64, -1: in none): whole samples, by ``trajectory``, are assigned to at most ``updates``
    optimizer steps in turn, samples without weight to none. Returns the number of updates too, at most one per weighted
    sample.

    A row's update does not depend on the number of members. The weights are multiplied by the number of updates: the
    mean of their gradients, at the same model, is the gradient of all rows together."""
    weight = rows.dense("weight")
    samples = rows.dense("trajectory") if "trajectory" in rows else np.arange(len(rows))
    numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples[weight > 0].tolist()))}
    updates = min(updates, len(numbers))
    update = [numbers[sample] % updates if sample in numbers else -1 for sample in samples.tolist()]
    return rows.with_columns(update=np.array(update, dtype=np.int64), weight=weight * np.float32(updates)), updates


def join_columns(rollouts: Batch, rows: Batch, aux_outputs: Sequence[Batch] = ()) -> Batch:
    """The columns of a loss: from rollout members, from the algorithm (``rows``), and from other roles, where a column
    of several roles is stacked, ``[seq, n]``.

    Raises RowsDiffer if, by their ``digest``, the rollouts are not the samples that were scored."""
    if "digest" in rollouts and "digest" in rows:
        differing = np.flatnonzero(np.asarray(rollouts["digest"]) != np.asarray(rows["digest"])).tolist()
        if differing:
            raise RowsDiffer(f"rows {differing[:20]} of {len(rows)} are not the samples that were scored")
    columns = {**rollouts.select(*TRAINED).columns, **rows.columns}
    for name in dict.fromkeys(name for output in aux_outputs for name in output.columns):
        columns[name] = _stack([output.ragged(name) for output in aux_outputs if name in output])
    return Batch(columns)


def _stack(columns: Sequence[Ragged]) -> Column:
    if len(columns) == 1:
        return columns[0]
    values = [column.values if column.values.ndim > 1 else column.values[:, None] for column in columns]
    return columns[0].like(np.concatenate(values, axis=1))


def run_updates(batch: Batch, plan: UpdatePlan, train: Callable[[Batch], UpdateResult]) -> list[UpdateResult]:
    """Train on the rows of each update, epoch by epoch; a rank without rows of an update takes part too."""
    return [train(part) for _ in range(plan.epochs) for part in _split_updates(batch, plan.updates)]


def _split_updates(batch: Batch, updates: int) -> Iterator[Batch]:
    if "update" not in batch:
        yield batch
        return
    update = batch.dense("update")
    for number in range(updates):
        rows = np.flatnonzero(update == number).tolist()
        yield batch if len(rows) == len(batch) else batch.take(rows)


_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
"""Dense floating-point operations per second of tensor cores in 16 bits, from the makers' data sheets."""

_PER_PARAMETER = 6
"""Floating-point operations of a token and parameter, forward and backward (Kaplan et al., arXiv:2001.08361, 2.1)."""


@dataclass(frozen=True)
class Machine:
    """The parameters of the whole model, and the peak FLOP/s of one member's device, None if unknown."""

    parameters: int
    peak_flops: float | None = None

    @classmethod
    def of(cls, engine: Any, device: str, precision: str) -> "Machine":
        """Of an engine; a user's engine may have no ``parameter_count``."""
        return cls(int(getattr(engine, "parameter_count", 0)), _peak(device, precision))

    def metrics(self, tokens: int, members: int, times: Mapping[str, float]) -> dict[str, float]:
        """``speed/tokens_per_s`` over the whole step. Over its update alone: ``speed/train_tflops`` (10^12 operations
        per second, without attention and recomputation), and its share of the peak, ``speed/mfu``, if known."""
        metrics = {"speed/tokens_per_s": tokens / times["time/step"]}
        update_s = times.get("time/update", 0.0)
        if not self.parameters or not update_s:
            return metrics
        flops = _PER_PARAMETER * self.parameters * tokens / update_s
        share = {"speed/mfu": flops / (self.peak_flops * members)} if self.peak_flops else {}
        return {**metrics, "speed/train_tflops": flops / 1e12, **share}


def _peak(device: str, precision: str) -> float | None:
    if torch.device(device).type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(torch.device(device)).upper()
    return next((peak for device_name, peak in _PEAKS.items() if device_name in name), None)


def peak_memory(device: str) -> dict[str, float]:
    """``memory/peak_gib``: the most that this process has had allocated on ``device``; empty for a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    return {"memory/peak_gib": torch.cuda.max_memory_allocated(torch.device(device)) / 2**30}


def average_metrics(trained: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over a step's updates, the last learning rate, and the number of skipped updates, which the means leave
    out unless they are all."""
    taken = [one for one in trained if not one.skipped] or trained
    values = [{"loss": one.loss, "grad_norm": one.grad_norm, **one.metrics} for one in taken]
    means = {name: sum(one.get(name, 0.0) for one in values) / len(values) for name in values[0]}
    return {**means, "lr": trained[-1].lr, "updates/skipped": float(sum(one.skipped for one in trained))}
