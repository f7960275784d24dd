# SPDX-License-Identifier: Apache-2.0
"""The plan of the memory of a job's devices: a table before anything starts, with a remedy for what does not fit, and
the choices of a run by the memory of its devices.

:func:`choose_passes` is called once in a run, so that all ranks and their replacements compute alike: a replaced
trainer repeats the calls of ``init``, and workers answer them from their records, the choice among them.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import ConfigError, EngineError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.model_shape import ModelShape, shape_of
from dlrover.python.rl.recipe.base.config import AUTO, EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare
from dlrover.python.rl.recipe.base.model_files import GB
from dlrover.python.rl.recipe.memory.arithmetic import (
    ON_HOST,
    SIZED,
    STATE_ONLY,
    ModelUse,
    PlannedBytes,
    bytes_of,
    has_auto_passes,
    has_state_only,
    host_bytes,
    is_on_host,
    is_quantized,
    pass_choices,
    size_passes,
    sizes_of,
)
from dlrover.python.rl.trainer.port import gather

_LOG = get_logger(__name__)

_USABLE = 0.92  # share of a device's memory: CUDA takes the rest, and fragmentation
_MOST_MEMBERS = 1024

_STATE = ("weights", "gradients", "optimizer")
_COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "kv_cache", "exchange")


@dataclass(frozen=True)
class MemoryPlan:
    """The uses of a job's models on CUDA by role; ``engine`` is resolved."""

    uses: Mapping[RLRoleType, ModelUse]
    engine: EngineConfig
    model: str = ""  # the policy
    model_config: str | None = None  # the policy's
    device_bytes: float | None = None  # of the job's devices, or else of this machine's
    chosen: str = ""  # a line about passes that were ``auto``

    def sized(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        """Yield the roles whose memory is computed; another check reports sizes that do not divide their workers."""
        for role, use in self.uses.items():
            is_computed = use.kind == "rollout" or self.engine.train in ("fsdp2", *STATE_ONLY)
            shape = self._shape_of(use) if is_computed and _divides(self.engine, use) else None
            if shape is not None:
                yield role, use, shape

    def known(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        """Yield the roles of :meth:`sized` whose passes are computed, too."""
        return (each for each in self.sized() if not has_state_only(each[1], self.engine))

    def _shape_of(self, use: ModelUse) -> ModelShape | None:
        return shape_of(use.model, self.model_config if use.model == self.model else None)

    @property
    def kept_bytes(self) -> float:
        """Bytes of two versions of the weights, or of the model under adapters, for ``weight_sync: cuda_ipc``."""
        sent = sum(bytes_of(shape, use, self.engine).weights for _, use, shape in self.known() if use.kind == "rollout")
        return sent if self.engine.lora is not None else 2 * sent

    def size_passes(self) -> "MemoryPlan":
        """Return the plan with the largest passes that fit every role that trains or evaluates in place of ``auto``."""
        uses = [use for use in self.uses.values() if use.kind != "rollout" and _divides(self.engine, use)]
        if not has_auto_passes(self.engine) or not uses:
            return self
        engines = [size_passes(self.engine, use, self._shape_of(use), self.device_bytes) for use in uses]
        recompute = any(each.recomputes for use, each in zip(uses, engines, strict=True) if use.kind == "trained")
        tokens = min(engine.tokens_of_a_pass for engine in engines)
        recomputed = ", activations recomputed" if recompute else ""
        later = "; they are sized once the devices are known (engine.device_memory_gb)"
        chosen = f"  passes of {tokens:,} tokens{recomputed}{later if self.device_bytes is None else ''}"
        return replace(self, engine=self.engine.with_passes(tokens, recompute), chosen=chosen)

    def lines(self) -> list[str]:
        """Return a table, the roles that it lacks, and what does not fit on this machine's devices."""
        if not self.uses:
            return []
        engine, rows, states = self.engine, list[list[str]](), list[str]()
        notes, unknown = [self.chosen] if self.chosen else [], dict(self.uses)
        for role, use, shape in self.sized():
            del unknown[role]
            name, planned = f"{role} x{use.members}", bytes_of(shape, use, engine)
            on_host = host_bytes(shape, use, engine)
            if has_state_only(use, engine):
                parts = ", ".join(f"{part} {_gb(getattr(planned, part))}" for part in _STATE if getattr(planned, part))
                more = f", and {_gb(on_host)} of its host" if on_host else ""
                needed = f"at least {_gb(planned.peak)} ({parts}){more}"
                states.append(f"  {name}: {needed}; passes are not computed for {engine.train}")
                continue
            if on_host:
                threads = "" if engine.threads else "; engine.threads: the cores that take its step"
                notes.append(f"  {name}: {_gb(on_host)} GB of its host's memory each, for the optimizer{threads}")
            planned = self._with_cache(use, planned)
            rows.append([name, *(_gb(getattr(planned, column)) for column in _COLUMNS), _gb(planned.peak)])
        notes += states
        if engine.weight_sync == "cuda_ipc" and (nbytes := self.kept_bytes):
            notes.append(f"  and {_gb(nbytes)} GB of weights that the actor keeps on the device for the rollout")
        for role, use in unknown.items():
            reason = f"not known without the config.json of {use.model}"
            if use.kind != "rollout" and engine.train not in ("fsdp2", *STATE_ONLY):
                reason = f"not computed for {engine.train}"
            elif use.model == self.model:
                reason += " (config.model_config)"
            notes.append(f"  {role} x{use.members}: {reason}")
        if engine.device_memory_gb is None:
            notes += [f"  it may not fit here: {message}" for message in self._misfits()]
        capacity = "" if self.device_bytes is None else f" of {self.device_bytes / GB:,.0f}"
        return [f"memory of each device, GB{capacity}:", *_table(rows), *notes]

    def _with_cache(self, use: ModelUse, planned: PlannedBytes) -> PlannedBytes:
        """Return the plan of a rollout with its cache: its size in the job, or the remainder of its share."""
        if use.kind != "rollout":
            return planned
        if size := self.engine.rollout_options.get("kv_cache_bytes"):
            return replace(planned, kv_cache=float(size))
        if self.device_bytes is None:
            return planned
        room = max(self.engine.gpu_memory_utilization * self.device_bytes - planned.weights, 0.0)
        fills = engine_info(ROLLOUT_ENGINES, self.engine.rollout).fills_device
        return replace(planned, kv_cache=room if fills else min(planned.kv_cache, room))

    def find_errors(self) -> list[ConfigError]:
        misfits = self._misfits() if self.engine.device_memory_gb is not None else []
        return [ConfigError("config.engine", message) for message in misfits]

    def _misfits(self) -> list[str]:
        """Return a message about each role that does not fit: its bytes, and the first remedy."""
        messages, capacity, engine = list[str](), self.device_bytes, self.engine
        if capacity is None:
            return messages
        for role, use, shape in self.sized():
            limit = (engine.gpu_memory_utilization if use.kind == "rollout" else _USABLE) * capacity
            planned = bytes_of(shape, use, engine)
            if (needed := _needed_bytes(use, planned, engine)) <= limit:
                continue
            has = f"{_gb(limit)} GB of a device's {_gb(capacity)}"
            sizes = {name.replace("_", " "): size for name in _COLUMNS if (size := getattr(planned, name))}
            parts = ", ".join(f"{name} {_gb(sizes[name])}" for name in sorted(sizes, key=lambda name: -sizes[name])[:3])
            if use.kind == "rollout":
                parts = f"weights {_gb(planned.weights)}, and the cache of one sequence"
            purpose = " for its weights, gradients and optimizer" if has_state_only(use, engine) else ""
            parts = "" if purpose else f" ({parts})"
            change = _find_change(role, use, shape, engine, limit)
            messages.append(f"{role} needs {_gb(needed)} GB{purpose}, and has {has}{parts}; {change}")
        return messages


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["", *(name.replace("_", " ") for name in _COLUMNS), "at most"]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = []
    for label, *cells in [head, *rows] if rows else []:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        table.append("  ".join([f"  {label.ljust(widths[0])}", *aligned]))
    return table


def _needed_bytes(use: ModelUse, planned: PlannedBytes, engine: EngineConfig) -> float:
    return planned.weights + planned.kv_cache / engine.max_batch if use.kind == "rollout" else planned.peak


def _divides(engine: EngineConfig, use: ModelUse) -> bool:
    if use.kind != "trained":
        return True
    try:
        Layout.of(use.members, engine.parallel or ParallelSizes())
    except EngineError:
        return False
    return True


Changes: TypeAlias = dict[str, Any]  # settings by their names in a job


def _find_change(role: RLRoleType, use: ModelUse, shape: ModelShape, engine: EngineConfig, limit: float) -> str:
    """Name the first change, alone or with smaller passes, with which a role takes at most ``limit`` bytes."""
    name, passes = f"workload.{role.lower()}", [Changes()]
    if use.kind != "rollout" and engine.train == "fsdp2":
        passes = [
            ({"engine.gradient_checkpointing": True} if recompute and not engine.recomputes else {})
            | ({"engine.max_tokens_per_microbatch": tokens} if tokens < engine.tokens_of_a_pass else {})
            for tokens, recompute in pass_choices(engine, use)
        ]
    for lever, smaller in product(_levers(name, use, engine), passes):
        changes = smaller | lever
        changed, resized = _apply(engine, changes), replace(use, members=lever.get(f"{name}.num", use.members))
        if not _divides(changed, resized):
            continue
        needed = _needed_bytes(resized, bytes_of(shape, resized, changed), changed)
        if needed > limit:
            continue
        settings = " ".join(f"{key}={'true' if value is True else value}" for key, value in changes.items())
        if has_state_only(use, engine):
            return f"with {settings} it is {_gb(needed)} GB"
        on_host = host_bytes(shape, resized, changed)
        return f"it fits with {settings}" + (f" and {_gb(on_host)} GB of its host" if on_host else "")
    return "no setting here makes it fit"


def _levers(name: str, use: ModelUse, engine: EngineConfig) -> Iterator[Changes]:
    """Yield no change, a division of the model over the workers, the optimizer on the host, and more workers."""
    sizes, divisions = engine.parallel or ParallelSizes(), list[Changes]()
    if use.kind == "rollout":
        key = "engine.rollout_tensor_parallel_size"
        yield from ({key: size, f"{name}.resource.gpu": size} for size in (2, 4, 8))
        return
    if use.kind == "frozen":
        if engine.train == "fsdp2" and use.sharded_class and not engine.shard_frozen:
            divisions = [{"engine.shard_frozen": True, f"{name}.class": use.sharded_class}]
    elif engine.train == "megatron":
        larger = (size for size in (2, 4, 8) if size > sizes.tensor_parallel_size)
        divisions = [{"engine.parallel.tensor_parallel_size": size} for size in larger]
    elif engine.train == "deepspeed" and engine.train_options.get("zero_stage", 3) != 3:
        divisions = [{"engine.train_options.zero_stage": 3}]
    elif engine.train == "fsdp2":
        copies = sizes_of(use, engine).ddp_size > 1 or (engine.parallel is None and is_quantized(use))
        divisions = [{"engine.parallel.ddp_size": 1}] if copies else []
    yield from ({}, *divisions)
    divided = [divisions[-1] if divisions else Changes()]
    if use.kind == "trained" and engine.train in ON_HOST and not is_on_host(engine):
        on_host = {**divided[0], "engine.train_options.optimizer_on_host": True}
        yield on_host
        divided += [on_host] if engine.train == "deepspeed" else []
    members = 2 * use.members
    while members <= _MOST_MEMBERS:
        yield from ({**changes, f"{name}.num": members} for changes in divided)
        members *= 2


def _apply(engine: EngineConfig, changes: Changes) -> EngineConfig:
    for name, value in changes.items():
        scope, field, option = [*name.split("."), ""][:3]
        if scope != "engine":
            continue
        if field == "train_options":
            value = {**engine.train_options, option: value}
        elif field == "parallel":
            value = replace(engine.parallel or ParallelSizes(), **{option: value})
        engine = replace(engine, **{field: value})
    return engine


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:,.1f}" if nbytes else "-"


def choose_passes(trainer: Any, cfg: Any, uses: Mapping[RLRoleType, ModelUse]) -> EngineConfig:
    """Return ``cfg.engine`` without ``auto`` for passes and offload, and with ``cuda_ipc`` for ``auto`` if possible."""
    engine: EngineConfig = cfg.engine
    may_stay = engine.offload == AUTO or (engine.offload is False and engine.weight_sync == AUTO)
    asks = may_stay and engine.device.startswith("cuda")
    if not has_auto_passes(engine) and not asks:
        return engine
    groups = {role: getattr(trainer, f"RG_{role}") for role in uses}
    sharing = {role: group for role, group in groups.items() if hasattr(group.workload_class, "device_share")}
    shares = {role: _all_of(group.device_share, engine) for role, group in sharing.items()}
    capacity = smallest_device(engine, uses, shares)
    plan = MemoryPlan(uses, engine, cfg.model, cfg.model_config, capacity).size_passes()
    if has_auto_passes(engine):
        now = plan.engine.tokens_of_a_pass, plan.engine.recomputes
        choices = [answer for group in sharing.values() for answer in _all_of(group.keep_passes, *now)]
        tokens, recompute = next((first for first in choices if first != now), now)
        _LOG.info("passes of %d tokens, activations %s", tokens, "recomputed" if recompute else "kept")
        plan = replace(plan, engine=engine.with_passes(tokens, recompute))
    if not asks:
        return plan.engine
    apart = {role: getattr(trainer, f"RG_{role}") for role in trainer.actor_handles if role not in sharing}
    unplanned = {role for role, group in apart.items() if getattr(group.workload_class, "uses_device", True)}
    engine = plan.engine
    if engine.offload == AUTO:
        stay = all_stay(plan, shares, unplanned, plan.kept_bytes if engine.weight_sync == "cuda_ipc" else 0.0)
        if any(share.in_turn for members in shares.values() for share in members if share is not None):
            _LOG.info("engines %s the devices that they share", "stay on" if stay else "leave")
        engine = replace(engine, offload=not stay)
    if not engine.offload and engine.weight_sync == AUTO and weights_stay(plan, shares, unplanned):
        _LOG.info("new weights for the rollout stay on the device")
        return replace(engine, weight_sync="cuda_ipc")
    return engine


def weights_stay(
    plan: MemoryPlan, shares: Mapping[RLRoleType, Sequence[DeviceShare | None]], unplanned: Collection[RLRoleType] = ()
) -> bool:
    """Return True if the weights between an actor and a rollout can be kept on their device: they share it, one can
    open the memory of the other, and it has room for the weights beside all engines."""
    sides = [shares.get(role, ()) for role in (RLRoleType.ACTOR, RLRoleType.ROLLOUT)]
    members = [share for side in sides for share in side if share is not None and share.opens]
    if [len(side) for side in sides] != [1, 1] or len(members) != 2 or len({share.place for share in members}) != 1:
        return False
    return all_stay(plan, shares, unplanned, plan.kept_bytes)


def all_stay(
    plan: MemoryPlan,
    shares: Mapping[RLRoleType, Sequence[DeviceShare | None]],
    unplanned: Collection[RLRoleType] = (),
    more: float = 0.0,
) -> bool:
    """Return True if workers that use a device in turn can all stay on it, with ``more`` bytes. False if the needs of
    one are unknown, as of ``unplanned`` roles, which the plan lacks, or if rows may be longer than planned."""
    planned = {role: bytes_of(shape, use, plan.engine) for role, use, shape in plan.known() if use.bounded}
    places: dict[str, list[tuple[RLRoleType, DeviceShare]]] = {}
    for role, share in ((role, share) for role, members in shares.items() for share in members if share is not None):
        places.setdefault(share.place, []).append((role, share))
    shared = [place for place in places.values() if any(share.in_turn for _, share in place)]
    members = [member for place in shared for member in place]
    if not members or plan.engine.rollout != "torch" or not all(share.in_turn for _, share in members):
        return False
    if any(role not in planned or any(str(other) in share.roles for other in unplanned) for role, share in members):
        return False
    for place in shared:
        engines = [planned[role] for role, _ in place]
        limit = min(SIZED * min(share.nbytes for _, share in place), *(share.free for _, share in place))
        resting = more + sum(each.resting for each in engines)
        if any(resting - each.resting + each.peak > limit for each in engines):  # one computes at a time
            return False
    return True


def _all_of(method: Any, *arguments: Any) -> list[Any]:
    """Call all workers, also those that compute on the same rows, and return their answers."""
    return gather(method.options(blocking=False)(*arguments).refs, None)


def smallest_device(
    engine: EngineConfig, uses: Mapping[RLRoleType, ModelUse], shares: Mapping[RLRoleType, Sequence[DeviceShare | None]]
) -> float | None:
    """Bytes for each worker that trains or evaluates: those that compute at the same time divide a device."""
    if engine.device_memory_gb is not None:
        return engine.device_memory_gb * GB
    users = Counter(share.place for members in shares.values() for share in members if share is not None)
    own = [
        share.nbytes / (1 if share.in_turn else users[share.place])
        for role, members in shares.items()
        for share in members
        if share is not None and uses[role].kind != "rollout"
    ]
    return min(own, default=None)
