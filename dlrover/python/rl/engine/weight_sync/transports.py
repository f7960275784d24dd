# SPDX-License-Identifier: Apache-2.0
"""The transports that ``engine.weight_sync`` names, their requirements, and the sending of adapters without the model
that they are added to."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, EngineError, WeightSyncError
from dlrover.python.rl.common.extensions import ExtensionPoint
from dlrover.python.rl.config.typed import salvage
from dlrover.python.rl.engine.api.weights import Adapters, WeightSnapshot, WeightStamp, adapted_stamp
from dlrover.python.rl.engine.weight_sync.base import (
    ALIGN,
    SyncSettings,
    Ticket,
    WeightSource,
    WeightTransport,
    waits_for_receivers,
)

_PACKAGE = "dlrover.python.rl.engine.weight_sync"

TRANSPORTS = ExtensionPoint(
    "weight transport",
    "dlrover_rl.weight_transports",
    {
        "auto": f"{_PACKAGE}.pull:PullTransport",
        "pull": f"{_PACKAGE}.pull:PullTransport",
        "broadcast": f"{_PACKAGE}.collective:BroadcastTransport",
        "cuda_ipc": f"{_PACKAGE}.cuda_ipc:CudaIpcTransport",
    },
)
"""Classes that each side constructs as ``Transport(settings)``; see ``WeightTransport``. A class with a true attribute
``waits_for_receivers`` sends while the receivers receive; others keep what was sent. Where adapters are trained, each
side has two more transports of a class with a true attribute ``sends_adapters_alone``, with a ``channel`` each."""


@dataclass(frozen=True)
class WeightSyncOptions:
    bucket_bytes: Annotated[int, Ge(ALIGN)] | None = None
    """Bytes sent at a time; None: 1 MiB on a host, 64 MiB on a device."""

    timeout_s: Annotated[float, Gt(0.0)] | None = None
    """Longest wait for the other side without progress; None: 60 s for ``broadcast``, which waits for its receivers,
    5 s for the other built-in transports."""


def validate_transport(
    name: str, options: Mapping[str, Any], device: str, where: str = "config.engine.weight_sync"
) -> list[ConfigError]:
    """Check name (key ``where``) and options (key ``{where}_options``) of a transport."""
    _, errors = salvage(WeightSyncOptions, dict(options), f"{where}_options")
    try:
        if TRANSPORTS.place(name) not in TRANSPORTS.builtin.values():
            TRANSPORTS.load(name)
    except ClassNotFound as error:
        errors.append(ConfigError(where, str(error)))
    if name == "cuda_ipc" and not device.startswith("cuda"):
        errors.append(ConfigError(where, f"'cuda_ipc' needs engine.device cuda, which is {device}"))
    if name == "broadcast" and device.startswith("cuda:"):
        errors.append(ConfigError(where, f"'broadcast' needs a device for each worker: engine.device is {device}"))
    return errors


def check_collocation(
    name: str, device: str, is_collocated: bool, in_one_process: bool = False, receivers: int = 1
) -> None:
    """Raise EngineError for a transport that does not fit the workers' places: nccl needs separate devices, CUDA IPC a
    shared one, and receivers of one process cannot receive at the same time."""
    if name == "broadcast" and is_collocated and device.startswith("cuda"):
        raise EngineError("engine.weight_sync 'broadcast' needs actor and rollout on separate devices")
    if name == "cuda_ipc" and not is_collocated:
        raise EngineError("engine.weight_sync 'cuda_ipc' needs actor and rollout in one workload_group")
    if in_one_process and receivers > 1 and waits_for_receivers(TRANSPORTS.load(name)):
        raise EngineError(
            f"engine.weight_sync '{name}' sends to {receivers} rollouts at once, but in one process they receive in"
            " turn: leave out --local, or use 'pull', or one rollout"
        )


_MODEL, _ADAPTERS = "model", "adapters"


@dataclass(eq=False)
class _PartialSource:
    """The adapters of a source, or the model under them, as a source."""

    version: int
    named_weights: Callable[..., Iterator[tuple[str, Any]]]


class AdapterTransport:
    """Implements ``WeightTransport`` over transports that keep what was sent: one for whole models, and where adapters
    are trained one for the model under them and one for the adapters, with a ``channel`` each.

    ::

        sender                                          receivers
          the model without adapters   ---- once ---->    kept, as bytes
          the adapters of version 7    ------------->     added to it, tensor by tensor, when the engine loads them
          the adapters of version 8    ------------->

    A source with adapters has, besides ``named_weights``:

    - ``adapter_scale``: the factor of ``up @ down``; None if it has no adapters to send alone.
    - ``base_version``: differs, on all train ranks, once the weights under the adapters may have changed.
    - ``named_base_weights(dtype)``: the weights without the adapters.
    - ``named_adapters()``: the adapters under the names of their weights with ``DOWN`` (``[rank, inputs]``) or ``UP``
      (``[outputs, rank]``); a collective, too.
    - ``any_rank(flag)``: True on all ranks that gather weights together if the flag is true on one; a collective.
    """

    def __init__(self, make: Callable[[SyncSettings], WeightTransport], settings: SyncSettings) -> None:
        self.settings = settings
        self._make, self._whole = make, make(settings)
        self._parts: dict[str, WeightTransport] = {}
        self._owner: Callable[[], Any] = lambda: None  # the source of model and adapters
        self._model = self._adapters = _PartialSource(-1, lambda dtype=None: iter(()))
        self._model_ticket: Ticket | None = None
        self._model_stamp: WeightStamp | None = None  # on the leading rank
        self._is_model_sent = False
        self._received: tuple[str, WeightSnapshot] | None = None

    def _part(self, name: str) -> WeightTransport:
        if name not in self._parts:
            self._parts[name] = self._make(replace(self.settings, channel=f"{self.settings.channel}-{name}"))
        return self._parts[name]

    def _has_model_of(self, source: Any) -> bool:
        return self._owner() is source and bool(self._model.version == source.base_version)

    def offer(self, source: WeightSource) -> Ticket:
        scale = getattr(source, "adapter_scale", None)
        if scale is None:
            return self._whole.offer(source)
        owner: Any = source
        if not self._has_model_of(owner):
            if _MODEL in self._parts:
                self._parts.pop(_MODEL).close()
            proxy, self._owner, self._model_ticket = weakref.proxy(owner), weakref.ref(owner), None
            self._model = _PartialSource(owner.base_version, lambda dtype=None: proxy.named_base_weights(dtype))
            self._adapters = _PartialSource(owner.version, lambda dtype=None: proxy.named_adapters())
        self._adapters.version = owner.version
        if self._model_ticket is None or not self._is_model_sent:
            self._model_ticket, self._is_model_sent = self._part(_MODEL).offer(self._model), False
        return replace(self._part(_ADAPTERS).offer(self._adapters), base=self._model_ticket, scale=scale)

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        if ticket.base is None:
            return self._whole.send(ticket, source)
        owner: Any = source
        if not self._has_model_of(owner):
            raise WeightSyncError(f"{ticket} was offered, but the source has another model under its adapters now")
        self._adapters.version = owner.version
        is_new = owner.any_rank(not self._is_model_sent)
        try:
            if is_new:
                self._is_model_sent = False
                self._model_stamp = self._part(_MODEL).send(ticket.base, self._model)
                self._is_model_sent = True
        finally:  # after a failure, too: it is a collective
            stamp = self._part(_ADAPTERS).send(ticket, self._adapters)
        if stamp is None or self._model_stamp is None:
            return None  # this rank does not lead
        return adapted_stamp(self._model_stamp, stamp, ticket.scale)

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        if ticket.base is None:
            self._received = None
            return self._whole.receive(ticket)
        if self._received is None or self._received[0] != ticket.base.id:
            self._received = None  # its memory is free before the next model comes
            self._received = ticket.base.id, self._part(_MODEL).receive(ticket.base)
        base = self._received[1]
        adapters = Adapters(self._part(_ADAPTERS).receive(replace(ticket, base=None)), ticket.scale)
        locks = [lock for lock in (base.lock_pages, adapters.factors.lock_pages) if lock is not None]

        def lock_pages(device: torch.device) -> bool:
            return all([lock(device) for lock in locks])

        return replace(base, version=ticket.version, adapters=adapters, lock_pages=lock_pages if locks else None)

    def close(self) -> None:
        with ExitStack() as stack:
            for transport in (self._whole, *self._parts.values()):
                stack.callback(transport.close)
        self._parts, self._owner, self._received = {}, lambda: None, None


def make_transport(name: str, options: Mapping[str, Any], settings: SyncSettings) -> WeightTransport:
    transport: Callable[[SyncSettings], WeightTransport] = TRANSPORTS.load(name)
    parsed = WeightSyncOptions(**options)
    timeout_s = parsed.timeout_s or (60.0 if waits_for_receivers(transport) else settings.timeout_s)
    settings = replace(settings, bucket_bytes=parsed.bucket_bytes, timeout_s=timeout_s)
    if waits_for_receivers(transport) or not getattr(transport, "sends_adapters_alone", False):
        return transport(settings)
    return AdapterTransport(transport, settings)
