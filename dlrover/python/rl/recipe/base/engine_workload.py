# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the same few classes make an engine, lock its device, step it and save it.
"""The shared part of the ready workloads: they make an engine, lock its device and turn rows into optimizer steps.

Roles that share a device have it one at a time, each for one call, which locks the device, moves the engine there and,
unless all engines fit, back to host memory. The kernel releases the lock of a worker that dies.

There is no deadlock: workers that share one device share all their devices, and lock them in the same order. Ranks that
meet in collectives (an actor, a critic, a sharded reference) wait inside their locks for each other, so the trainers
load and call one such role after another.
"""

import functools
import hashlib
import importlib
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.api.base import BaseTrainEngine, LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class, engine_info
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.memory.device_lock import DeviceLock, DeviceTurns
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.model_shape import shape_of
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.model.ranks import get_random_state, seed_random, set_random_state, use_device
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import shares_memory
from dlrover.python.rl.engine.weight_sync.transports import check_collocation, make_transport
from dlrover.python.rl.recipe.base.config import EngineConfig, SenderConfig
from dlrover.python.rl.recipe.base.model_files import device_bytes, setting_of_weights, trained_bytes
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root
from dlrover.python.rl.runtime.checkpoint.runs import local_folder
from dlrover.python.rl.trainer.workload import BaseWorkload, Setting, trainer_invocation

_PATIENCE_S = 5.0  # after this long without data a receiver of weights asks its sender's role again


def device_of(workload: BaseWorkload, engine: EngineConfig) -> str:
    """The torch device of a worker; for ``cuda`` its first reserved device, or the device of its local rank."""
    engine = engine.resolve(torch.cuda.is_available())
    if engine.device != "cuda":
        return engine.device
    return f"cuda:{workload.devices[0] if workload.devices else workload.local_rank}"


def train_settings(engine: EngineConfig, device: str, parallel: ParallelSizes) -> TrainSettings:
    return TrainSettings(
        device,
        engine.dtype,
        max_tokens_per_microbatch=engine.tokens_of_a_pass,
        gradient_checkpointing=engine.recomputes,
        parallel=parallel,
        save_dtype=engine.save_dtype,
        backend=engine.train_options,
        mask_unknown_ids=engine.mask_unknown_ids,
    )


def use_threads(count: int | None) -> None:
    if count is not None:
        torch.set_num_threads(count)


F = TypeVar("F", bound=Callable[..., Any])

_LONGEST_TURN_S = 3600.0  # limit of the wait for a device; a worker that hangs on it is found earlier, by its own limit


class DeviceShare(NamedTuple):
    place: str  # node and device
    nbytes: float
    in_turn: bool  # its workers have the device one at a time
    roles: tuple[str, ...] = ()  # the roles of these workers
    free: float = math.inf  # bytes, before the engines are made
    opens: bool = True  # another process can open this process's memory on the device, or need not


class EngineWorkload(BaseWorkload):
    """A workload with one engine, ``self._engine``, which locks its device where several roles share it."""

    guards_state: ClassVar[bool] = True
    takes_turns: ClassVar[bool | None] = None
    """True: workers that share a device have it one at a time. None: only on accelerators, not on a host's cores."""

    lingers: ClassVar[bool] = False
    """True: the engine stays on a shared device after a turn until another worker waits for it."""

    warmup: ClassVar[str] = "warm_reference"  # the function of ``recipe.base.warmup`` that warms up a standby
    _engine: Any = None
    _transport: WeightTransport | None = None
    _device_locks: tuple[DeviceLock, ...] = ()
    _turns: DeviceTurns | None = None
    _stays: bool = False  # the engine stays on a shared device between its turns
    _memory: DeviceMemory | None = None
    _is_deterministic: bool = False

    @classmethod
    def warm_up(cls) -> None:
        # imported here: only standbys need the classes that it loads
        getattr(importlib.import_module("dlrover.python.rl.recipe.base.warmup"), cls.warmup)()

    @trainer_invocation(target="RANK0")
    def vocabulary(self) -> str:
        """A digest, equal for models whose tokenizers give every token the same id."""
        vocabulary = json.dumps(sorted(self._engine.tokenizer.get_vocab().items()))
        return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]

    def device_share(self, engine: EngineConfig) -> DeviceShare | None:
        device = device_of(self, engine)
        nbytes = device_bytes(engine, device) if device.startswith("cuda") else None
        if nbytes is None:
            return None
        place, in_turn = f"{socket.gethostname()}/{physical_device(device)}", self._shares_in_turn(device)
        roles = tuple((self.get_device_collocation() or "").split(","))
        if not self._computes_here(engine):
            return DeviceShare(place, nbytes, in_turn, roles, math.inf, opens=False)
        free = float(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else math.inf
        opens = self._member.shares_process or not torch.cuda.is_available() or shares_memory(device)
        return DeviceShare(place, nbytes, in_turn, roles, free, opens)

    def _computes_here(self, engine: EngineConfig) -> bool:
        """Return False if the engine runs in a separate process: CUDA would only take memory in this one."""
        return True

    def keep_passes(self, tokens: int, recompute: bool) -> tuple[int, bool]:
        """Return the choice; a later trainer repeats the call and gets the recorded answer, the first one's choice."""
        return tokens, recompute

    def _shares_in_turn(self, device: str) -> bool:
        takes_turns = torch.device(device).type != "cpu" if self.takes_turns is None else self.takes_turns
        return bool(takes_turns and self.get_device_collocation() and self.name)

    @contextmanager
    def _first_turn(self, device: str, engine: EngineConfig) -> Iterator[DeviceMemory | None]:
        """Lock ``device`` to make the engine; yields the memory accounting of a shared device."""
        self._stays = engine.offload is False
        if not self._shares_in_turn(device):
            yield None
            return
        folder, owner = memory_root(*run_of(self.name)) / "devices", f"{self.role}[{self.rank}]"
        self._memory = memory = DeviceMemory(device)
        names = {physical_device(device), *(physical_device(f"cuda:{number}") for number in self.devices)}
        # sorted, so that no two processes wait for each other
        self._device_locks = tuple(DeviceLock(folder / name, owner, memory) for name in sorted(names))
        leave = functools.partial(self._leave_device, device if self._computes_here(engine) else "cpu")
        self._turns = DeviceTurns(self._device_locks, leave, self.lingers)
        with self._turn():
            yield memory

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lock the device inside the block, and move the engine there; it leaves afterwards, unless all engines fit."""
        with self._bare_turn():
            if self._device_locks and self._engine is not None:
                self._engine.cuda()
            yield

    def _leave_device(self, own_device: str) -> None:
        """Move the engine to the host at the end of a turn, unless all engines fit."""
        use_device(own_device)  # of this thread, which may be another one
        try:
            if self._engine is not None and not self._stays:
                self.wait_until_written()
                self._engine.cpu()
        finally:
            if self._memory is not None and not (self._stays and self._member.shares_process):
                self._memory.release_cache()

    def is_deterministic(self) -> bool:
        return self._is_deterministic

    def _bare_turn(self) -> AbstractContextManager[None]:
        """Lock the device; the engine only moves single tensors there, to join the parts of its ranks."""
        return nullcontext() if self._turns is None else self._turns.turn(_LONGEST_TURN_S)

    def _make_train_engine(
        self,
        model: str,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None = None,
        rendezvous: Rendezvous = Rendezvous(),  # noqa: B008 - frozen
        **changes: Any,
    ) -> None:
        """Make ``self._engine``, for this worker alone unless ``changes`` of the settings say otherwise."""
        engine = engine.resolve(torch.cuda.is_available())
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings = replace(train_settings(engine, device, ParallelSizes()), **changes)
        info = engine_info(TRAIN_ENGINES, engine.train)
        self._is_deterministic = torch.device(device).type in info.deterministic_on
        make = engine_class(TRAIN_ENGINES, engine.train)  # an import of seconds, before the device is locked
        use_device(device)
        with self._first_turn(device, engine) as memory:
            self._engine = make(model, optimizer, settings, rendezvous, memory)

    def _make_weight_transport(self, engine: EngineConfig, device: str, is_leader: bool = False) -> WeightTransport:
        shares_process = self._member.shares_process
        in_one_process = shares_process or "/" not in self.name
        receivers = engine.receivers if isinstance(engine, SenderConfig) else 1
        # a script with several rollouts in one process may use threads
        in_turn = receivers if shares_process else 1
        check_collocation(engine.weight_sync, device, bool(self.get_device_collocation()), in_one_process, in_turn)
        settings = SyncSettings(
            f"{self.role}[{self.rank}]",
            is_leader=is_leader,
            receivers=receivers,
            address=self.torch_master_addr or "127.0.0.1",
            channel=f"ACTOR-{run_of(self.name)[1]}" if "/" in self.name else "ACTOR",
            timeout_s=_PATIENCE_S,
            device=device,
            memory=self._memory,
            dtype=DTYPES[engine.dtype],
        )
        self._transport = transport = make_transport(engine.weight_sync, engine.weight_sync_options, settings)
        return transport

    def close(self) -> None:
        """Release everything: the process may continue with another object of this class."""
        with ExitStack() as stack:
            if self._turns is not None:
                self._turns.close()
            for lock in self._device_locks:
                stack.callback(lock.close)
            if self._engine is not None:
                stack.callback(self._engine.close)
            stack.callback(self._finish)
            if self._transport is not None:
                stack.callback(self._transport.close)

    def _finish(self) -> None:
        """Wait for threads that still use the engine. Raises EngineError if they do not end."""


def on_device(method: F) -> F:

    @functools.wraps(method)
    def in_turn(self: EngineWorkload, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def physical_device(device: str) -> str:
    """The name of ``device`` on its node, ``"cuda-3"``, independent of the devices that a process can see."""
    local = torch.device(device)
    index = str(local.index or 0)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return f"{local.type}-{visible[int(index)] if local.type == 'cuda' and int(index) < len(visible) else index}"


_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
"""Dense floating-point operations per second of tensor cores in 16 bits, from the makers' data sheets."""

_PER_PARAMETER = 6
"""Floating-point operations of a token and parameter, forward and backward (Kaplan et al., arXiv:2001.08361, 2.1)."""


@dataclass(frozen=True)
class Machine:
    """The parameters of the whole model, and the peak FLOP/s of one worker's device, None if unknown."""

    parameters: int
    peak_flops: float | None = None

    @classmethod
    def of(cls, engine: Any, device: str, precision: str) -> "Machine":
        """Return the machine of an engine; a user's engine may have no ``parameter_count``."""
        peak = None
        if torch.device(device).type == "cuda" and precision == "bf16":
            name = torch.cuda.get_device_name(torch.device(device)).upper()
            peak = next((flops for part, flops in _PEAKS.items() if part in name), None)
        return cls(int(getattr(engine, "parameter_count", 0)), peak)

    def metrics(self, tokens: int, trained: int, members: int, times: Mapping[str, float]) -> dict[str, float]:
        """Return ``speed/tokens_per_s`` of the step, and ``speed/train_tflops`` and ``speed/mfu`` of its update."""
        metrics = {"speed/tokens_per_s": tokens / times["time/step"]}
        update_s = times.get("time/update", 0.0)
        if not self.parameters or not update_s:
            return metrics
        flops = _PER_PARAMETER * self.parameters * trained / update_s
        share = {"speed/mfu": flops / (self.peak_flops * members)} if self.peak_flops else {}
        return {**metrics, "speed/train_tflops": flops / 1e12, **share}


def peak_memory(device: str) -> dict[str, float]:
    """Return ``memory/peak_gib``, this process's peak of allocated memory on ``device``; empty for a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    return {"memory/peak_gib": torch.cuda.max_memory_allocated(torch.device(device)) / 2**30}


class TrainedWorkload(EngineWorkload):
    """Workers divide the rows, and the model by ``engine.parallel``. Every rank saves its own state (12 bytes per
    parameter of a copy) and recovers from it, without a collective that another failure could break."""

    needs_own_process = True
    guards_state = True

    head: ClassVar[Head] = "causal"
    head_bias: ClassVar[bool] = True  # of a token head

    has_adapters: ClassVar[bool] = False  # True if ``engine.lora`` applies to this role
    optimizer_key: ClassVar[str] = "optimizer"  # the key of the optimizer's settings in ``config``
    warmup = "warm_actor"
    _engine: BaseTrainEngine

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Number of workers with different rows; the remaining ones split a matrix, a sequence or the layers."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return world_size // (engine.parallel or ParallelSizes()).replica_size

    @classmethod
    def keeps_process(cls, config: Any) -> bool:
        """Return True for FSDP2 on CPUs, or if its options say so. Other engines have global state."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        stays = engine.device == "cpu" or engine.train_options.get("keep_processes") is True
        return engine.train == "fsdp2" and stays

    @classmethod
    def state_bytes(cls, config: Any, world_size: int) -> int | None:
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        model, optimizer = cls._trained(config)
        fallback = config.get("model_config") if model == config["model"] else None
        lora = engine.lora if cls.has_adapters else None
        whole = trained_bytes(model, optimizer, lora, fallback, cls.head)
        copies = _holds_copies(engine, engine.device, lora)
        sizes = engine.parallel or ParallelSizes(ddp_size=world_size if copies else 1)
        return None if whole is None else whole // (world_size // sizes.ddp_size)

    @classmethod
    def settings_of_state(cls, config: Any) -> Mapping[str, Any]:
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        model, optimizer = cls._trained(config)
        lora, adapters = engine.lora if cls.has_adapters else None, None
        if lora is not None:
            shape = shape_of(model, config.get("model_config") if model == config["model"] else None)
            layers = lora.sorted_targets if shape is None else shape.targets_of(lora)
            adapters = {**asdict(lora), "targets": Setting(lora.sorted_targets, layers)}
        moments = {"name": optimizer.name, "momentum": Setting(optimizer.momentum, optimizer.momentum > 0)}
        weights = {cls.optimizer_key.replace("optimizer", "model"): setting_of_weights(model)}
        return {**weights, "engine": {"train": engine.train, "lora": adapters}, cls.optimizer_key: moments}

    @classmethod
    def _trained(cls, config: Any) -> tuple[str, OptimizerConfig]:
        return config["model"], require(OptimizerConfig, config.get("optimizer") or {}, "config.optimizer")

    def _load(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, seed: int, lora: LoraSettings | None = None
    ) -> None:
        rendezvous = Rendezvous(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        # copies if the engine can: a worker then recovers without the others
        copies = _holds_copies(engine, torch.device(device_of(self, engine)).type, lora)
        sizes = engine.parallel or ParallelSizes(ddp_size=self.world_size if copies else 1)
        heads = {"head": self.head, "head_bias": self.head_bias}
        self._make_train_engine(model, engine, optimizer, rendezvous, parallel=sizes, lora=lora, **heads)
        self._seed = (seed, self.role, self.rank)
        seed_random(*self._seed)

    def save(self, path: Path) -> None:
        """Write the model in Hugging Face format (rank 0 does); waits for space on a full disk."""
        save = self._engine.save
        calls = chain([save], repeat(getattr(self._engine, "save_again", save)))  # the other ranks take part once

        def attempt() -> None:
            with local_folder(path) as folder, self._bare_turn():  # not locked while it waits for space
                next(calls)(folder)

        with getattr(self._engine, "saving", nullcontext)():
            retry_io(attempt, path)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, version and random states: later steps depend on nothing else, bit for bit."""
        return {"engine": self._engine.state_dict(), "random": get_random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state["engine"])
        set_random_state(state["random"])

    @classmethod
    def takes_other_members(cls, config: Any) -> bool:
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return engine_info(TRAIN_ENGINES, engine.train).redivides

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Load this worker's part of the model, and the random state that an earlier worker of its rank had."""
        seed_random(*self._seed)

        def engines() -> Iterator[Mapping[str, Any]]:
            for rank, state in enumerate(states):
                if rank == self.rank:
                    set_random_state(state["random"])
                yield state["engine"]

        self._engine.load_states(engines())


def _holds_copies(engine: EngineConfig, device: str, lora: LoraSettings | None) -> bool:
    """Return True if each worker holds the whole model by default."""
    quantized = lora is not None and lora.quantize_base is not None
    return engine.train == "fsdp2" and (device == "cpu" or quantized)
