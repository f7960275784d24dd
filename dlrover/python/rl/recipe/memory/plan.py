# SPDX-License-Identifier: Apache-2.0
"""The memory that a job's models take on each device, for people, before anything starts: a table, and the smallest
change where something cannot fit. The arithmetic is in ``arithmetic``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import ConfigError, EngineError
from dlrover.python.rl.common.hub import NOT_LOOKED_UP, Lookup, current_lookup
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, TRAIN_ENGINES, absent_package, engine_info
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.model_shape import ModelShape, shape_of
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.model_files import GB, device_bytes, parameters_of
from dlrover.python.rl.recipe.memory.arithmetic import (
    FEW_TOKENS,
    FEWEST_TOKENS,
    STATE_ONLY,
    ModelUse,
    PlannedBytes,
    bytes_of,
    has_auto_passes,
    host_bytes,
    is_on_host,
    is_quantized,
    size_passes,
    sizes_of,
    state_of,
)

_USABLE = 0.92
"""Of a device's memory: the rest is CUDA's own, and lost between blocks."""

_MOST_MEMBERS = 1024

_TOKENS, _HOST = "engine.max_tokens_per_microbatch", "engine.train_options.optimizer_on_host"

_STATE = ("weights", "gradients", "optimizer")
_COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "kv_cache", "exchange")


@dataclass(frozen=True)
class MemoryPlan:
    """The uses of a job's models by role, where ``engine`` is resolved, on CUDA."""

    uses: Mapping[RLRoleType, ModelUse]
    engine: EngineConfig
    model: str = ""  # the policy's
    model_config: str | None = None  # of that
    device_bytes: float | None = None  # of the job's devices, or else of this machine's
    chosen: str = ""  # the passes, where they were ``auto``

    @classmethod
    def of(
        cls, uses: Mapping[RLRoleType, ModelUse], engine: EngineConfig, model: str, model_config: str | None
    ) -> "MemoryPlan":
        return cls(uses, engine, model, model_config, device_bytes(engine)).size_passes()

    def known(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        """Those to which the arithmetic applies, of models whose shape is known."""
        for role, use in self.uses.items():
            if use.kind != "rollout" and self.engine.train != "fsdp2":
                continue
            if not _divides(self.engine, use):
                continue  # reported already
            shape = self._shape_of(use)
            if shape is not None:
                yield role, use, shape

    def states(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        """Those of which only the state is computed."""
        for role, use in self.uses.items() if self.engine.train in STATE_ONLY else ():
            shape = self._shape_of(use)
            if use.kind != "rollout" and shape is not None and _divides(self.engine, use):
                yield role, use, shape

    def _shape_of(self, use: ModelUse) -> ModelShape | None:
        return shape_of(use.model, self.model_config if use.model == self.model else None)

    @property
    def kept_bytes(self) -> float:
        """Of the weights that an actor keeps on its device for a rollout with ``weight_sync: cuda_ipc``, where they are
        known: two versions, or the model under adapters."""
        sent = sum(bytes_of(shape, use, self.engine).weights for _, use, shape in self.known() if use.kind == "rollout")
        return sent if self.engine.lora is not None else 2 * sent

    def size_passes(self) -> "MemoryPlan":
        """The same without ``auto`` for passes: the largest that fit every role that trains or evaluates."""
        uses = [use for use in self.uses.values() if use.kind != "rollout" and _divides(self.engine, use)]
        if not has_auto_passes(self.engine) or not uses:
            return self
        found = [(use, size_passes(self.engine, use, self._shape_of(use), self.device_bytes)) for use in uses]
        recompute = any(engine.recomputes for use, engine in found if use.kind == "trained")
        tokens = min(engine.tokens_of_a_pass for _, engine in found)
        recomputed = ", activations recomputed" if recompute else ""
        later = "; they are sized once the devices are known (engine.device_memory_gb)"
        chosen = f"  passes of {tokens:,} tokens{recomputed}{later if self.device_bytes is None else ''}"
        return replace(self, engine=self.engine.with_passes(tokens, recompute), chosen=chosen)

    def lines(self) -> list[str]:
        """A table for people, the roles that it lacks, and what does not fit on this machine's devices; empty without a
        model on a device."""
        rows, known, notes = [], {role for role, *_ in self.known()}, [self.chosen] if self.chosen else []
        for role, use, shape in self.known():
            if nbytes := host_bytes(shape, use, self.engine):
                where = f"  {role} x{use.members}: {_gb(nbytes)} GB of its host's memory each, for the optimizer"
                notes.append(where if self.engine.threads else f"{where}; engine.threads: the cores that take its step")
            found = self._held(use, bytes_of(shape, use, self.engine))
            values = [*(getattr(found, name) for name in _COLUMNS), found.peak]
            rows.append([f"{role} x{use.members}", *map(_gb, values)])
        if not self.uses:
            return []
        for role, use, shape in self.states():
            known.add(role)
            state, on_host = state_of(shape, use, self.engine), host_bytes(shape, use, self.engine)
            parts = ", ".join(f"{name} {_gb(getattr(state, name))}" for name in _STATE if getattr(state, name))
            what = f"at least {_gb(state.peak)} ({parts})" + (f", and {_gb(on_host)} of its host" if on_host else "")
            notes.append(f"  {role} x{use.members}: {what}; passes are not computed for {self.engine.train}")
        if self.engine.weight_sync == "cuda_ipc" and self.kept_bytes:
            notes.append(
                f"  and {_gb(self.kept_bytes)} GB of weights that the actor keeps on the device for the rollout"
            )
        of = "" if self.device_bytes is None else f" of {self.device_bytes / GB:,.0f}"
        head = ["", *(name.replace("_", " ") for name in _COLUMNS), "at most"]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        table = []
        for label, *cells in [head, *rows]:
            aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
            table.append("  ".join([f"  {label.ljust(widths[0])}", *aligned]))
        warnings = [] if self.engine.device_memory_gb is not None else self._misfits()
        unknown = [
            f"  {role} x{use.members}: {self._why_unknown(use)}" for role, use in self.uses.items() if role not in known
        ]
        warnings = [f"  it may not fit here: {what}" for what in warnings]
        return [f"memory of each device, GB{of}:", *(table if rows else ()), *notes, *unknown, *warnings]

    def _why_unknown(self, use: ModelUse) -> str:
        if use.kind != "rollout" and self.engine.train not in ("fsdp2", *STATE_ONLY):
            return f"not computed for {self.engine.train}"
        named = " (config.model_config)" if use.model == self.model else ""
        return f"not known without the config.json of {use.model}{named}"

    def _held(self, use: ModelUse, wanted: PlannedBytes) -> PlannedBytes:
        """The cache of a rollout has the size that is given for it. Else it takes what there is of its share; an engine
        that does not fill its device, no more than it could use."""
        if use.kind != "rollout":
            return wanted
        if given := self.engine.rollout_options.get("kv_cache_bytes"):
            return replace(wanted, kv_cache=float(given))
        if self.device_bytes is None:
            return wanted
        rest = max(self.engine.gpu_memory_utilization * self.device_bytes - wanted.weights, 0.0)
        fills = engine_info(ROLLOUT_ENGINES, self.engine.rollout).fills_device
        return replace(wanted, kv_cache=rest if fills else min(wanted.kv_cache, rest))

    def find_errors(self) -> list[ConfigError]:
        """What cannot fit on devices of ``engine.device_memory_gb``, with the smallest change that would."""
        misfits = self._misfits() if self.engine.device_memory_gb is not None else []
        return [ConfigError("config.engine", what) for what in misfits]

    def _misfits(self) -> list[str]:
        if self.device_bytes is None:
            return []
        messages = (self._describe_misfit(*each) for each in (*self.known(), *self.states()))
        return [message for message in messages if message]

    def _describe_misfit(self, role: RLRoleType, use: ModelUse, shape: ModelShape) -> str:
        """Return the bytes and the smallest change with which it fits; empty if it fits as it is."""
        share = self.engine.gpu_memory_utilization if use.kind == "rollout" else _USABLE
        limit = share * (self.device_bytes or 0.0)
        planned = _plan_bytes(shape, use, self.engine)
        if (needed := _needed(use, planned, self.engine)) <= limit:
            return ""
        sizes = {name.replace("_", " "): size for name in _COLUMNS if (size := getattr(planned, name))}
        parts = ", ".join(f"{name} {_gb(sizes[name])}" for name in sorted(sizes, key=lambda name: -sizes[name])[:3])
        if use.kind == "rollout":
            parts = f"weights {_gb(planned.weights)}, and the cache of one sequence"
        has = f"{_gb(limit)} GB of a device's {_gb(self.device_bytes or 0.0)}"
        change = next(self._fitting_changes(role, use, shape, limit), "no setting here makes it fit")
        if _has_state_only(use, self.engine):
            return f"{role} needs {_gb(needed)} GB for its weights, gradients and optimizer, and has {has}; {change}"
        return f"{role} needs {_gb(needed)} GB, and has {has} ({parts}); {change}"

    def _fitting_changes(self, role: RLRoleType, use: ModelUse, shape: ModelShape, limit: float) -> Iterator[str]:
        name = f"workload.{role.lower()}"
        for changes in _alternatives(self.engine, use, name):
            engine = _apply(self.engine, changes)
            changed = replace(use, members=changes.get(f"{name}.num", use.members))
            if not _divides(engine, changed):
                continue
            needed = _needed(changed, _plan_bytes(shape, changed, engine), engine)
            if needed > limit:
                continue
            text = " ".join(f"{key}={'true' if value is True else value}" for key, value in changes.items())
            on_host = host_bytes(shape, changed, engine)
            if _has_state_only(use, engine):
                yield f"with {text} it is {_gb(needed)} GB"
            else:
                yield f"it fits with {text}" + (f" and {_gb(on_host)} GB of its host" if on_host else "")


def _has_state_only(use: ModelUse, engine: EngineConfig) -> bool:
    return use.kind != "rollout" and engine.train in STATE_ONLY


def _plan_bytes(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> PlannedBytes:
    return (state_of if _has_state_only(use, engine) else bytes_of)(shape, use, engine)


def _needed(use: ModelUse, planned: PlannedBytes, engine: EngineConfig) -> float:
    return planned.weights + planned.kv_cache / engine.max_batch if use.kind == "rollout" else planned.peak


def _divides(engine: EngineConfig, use: ModelUse) -> bool:
    """Whether the engine's sizes divide the members of a role that trains."""
    if use.kind != "trained":
        return True
    try:
        Layout.of(use.members, engine.parallel or ParallelSizes())
    except EngineError:
        return False
    return True


Changes: TypeAlias = dict[str, Any]
"""Settings by the names that they have in a job."""


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


def _alternatives(engine: EngineConfig, use: ModelUse, name: str) -> Iterator[Changes]:
    """Yield changes for the role ``name``, the smallest first: passes, the optimizer on the host, more members."""
    if use.kind == "rollout":
        larger = (size for size in (2, 4, 8) if size > engine.rollout_tensor_parallel_size)
        yield from ({"engine.rollout_tensor_parallel_size": size, f"{name}.resource.gpu": size} for size in larger)
        return
    divided: Changes = {}
    smaller = _smaller_states(engine) if _has_state_only(use, engine) else _smaller_passes(engine, use)
    yield from smaller
    if use.kind == "frozen":
        if not use.sharded_class or _has_state_only(use, engine):
            return
        if not engine.shard_frozen:
            divided = {"engine.shard_frozen": True, f"{name}.class": use.sharded_class}
    elif engine.train == "fsdp2":
        if not is_on_host(engine):
            yield from ({_HOST: True, **changes} for changes in smaller)
        if sizes_of(use, engine).ddp_size > 1 or (engine.parallel is None and is_quantized(use)):
            divided = {"engine.parallel.ddp_size": 1}
    members = use.members
    while members <= _MOST_MEMBERS:
        more = {f"{name}.num": members} if members > use.members else {}
        yield from ({**divided, **changes, **more} for changes in smaller)
        members *= 2


def _smaller_passes(engine: EngineConfig, use: ModelUse) -> list[Changes]:
    """Passes that take less memory, the engine's own first."""
    most = engine.tokens_of_a_pass
    halves = int(math.log2(max(most / max(FEWEST_TOKENS, use.longest), 1)))
    passes: list[Changes] = [{}, *({_TOKENS: most >> number} for number in range(1, halves + 1))]
    if use.kind == "trained" and not engine.recomputes:
        passes += [{"engine.gradient_checkpointing": True, **changes} for changes in passes]
    return sorted(passes, key=lambda changes: (changes.get(_TOKENS, most) < FEW_TOKENS, len(changes)))


def _smaller_states(engine: EngineConfig) -> list[Changes]:
    """Divisions of a state that take less memory, the engine's own first."""
    if engine.train == "megatron":
        tensor = (engine.parallel or ParallelSizes()).tensor_parallel_size
        return [{}, *({"engine.parallel.tensor_parallel_size": size} for size in (2, 4, 8) if size > tensor)]
    divided = {} if engine.train_options.get("zero_stage", 3) == 3 else {"engine.train_options.zero_stage": 3}
    return [{}, divided, {**divided, _HOST: True}]


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:,.1f}" if nbytes else "-"


def describe_engines(  # noqa: PLR0913 -- what the lines are about
    model: str,
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    fallback: str | None = None,
    head: Head = "causal",
    generates: bool = True,
) -> list[str]:
    """``fallback``: see :func:`~dlrover.python.rl.engine.model.model_shape.shape_of`."""
    parameters, shape, size = parameters_of(model, fallback), shape_of(model, fallback), ""
    if parameters is not None:
        weights = parameters * (2 if engine.precision == "bf16" else 4)
        uses = [f"{short_number(weights)}B of weights to generate"] if generates else []
        if shape is not None and not is_on_host(engine):
            use = ModelUse("trained", model, optimizer=optimizer, lora=engine.lora, head=head)
            planned = bytes_of(shape, use, replace(engine, parallel=None))
            trained = int(planned.weights + planned.gradients + planned.optimizer)
            uses.append(f"{short_number(trained)}B to train, activations not counted")
        size = "; ".join([f", {short_number(parameters)} parameters", *filter(None, [", ".join(uses)])])
    elif current_lookup() is Lookup.NONE and not Path(model).expanduser().is_dir():
        size = f", {NOT_LOOKED_UP}"
    absent = {
        absent_package(TRAIN_ENGINES, engine.train, engine.train_options),
        absent_package(ROLLOUT_ENGINES, engine.rollout, engine.rollout_options) if generates else "",
    }
    rollout = f", rollout {engine.rollout}" if generates else ""
    return [
        f"model: {model}{size}",
        f"engines: train {engine.train}{rollout}, on {engine.device} in {engine.precision}",
        *(f"  {package} is not on this machine: those of the job need it" for package in sorted(absent) if package),
    ]
