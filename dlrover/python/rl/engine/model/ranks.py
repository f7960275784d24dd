# SPDX-License-Identifier: Apache-2.0
"""The processes of one engine: their process group, small collectives, random states."""

import hashlib
import os
import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.sockets import interface_towards, is_loopback, listening_socket, wait_until_listening
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.api.base import Rendezvous, RolloutSettings

T = TypeVar("T")


def seed_random(*parts: int | str) -> None:
    """Seed Python, numpy and torch from a hash of ``parts``, equally in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype="<u4"))
    torch.manual_seed(int.from_bytes(digest, "little"))


def get_random_state() -> dict[str, Any]:
    cuda = [state.clone() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    torch_state = torch.get_rng_state()
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch_state, "cuda": cuda}


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random state after the block."""
    state = get_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore :func:`get_random_state`. Devices that were unused, then or now, keep their state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


def pack_random_state() -> Any:
    """Return :func:`get_random_state` as bytes in a tensor: the lengths of its parts, then the parts."""
    skeleton, buffers = state_tree.dump(get_random_state())
    parts = [skeleton, *map(bytes, buffers)]
    lengths = struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts))
    return torch.frombuffer(bytearray(lengths + b"".join(parts)), dtype=torch.uint8)


def unpack_random_state(packed: Any) -> None:
    content = packed.numpy().tobytes()
    (count,) = struct.unpack_from("<q", content)
    lengths = struct.unpack_from(f"<{count}q", content, 8)
    ends = list(accumulate(lengths, initial=8 * (count + 1)))
    skeleton, *buffers = (content[start:end] for start, end in pairwise(ends))
    set_random_state(state_tree.load(skeleton, [memoryview(buffer) for buffer in buffers]))


# torch 2.13 deprecates the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BUCKET_ELEMENTS = 1 << 24
"""Elements of one gradient all-reduce: large enough to hide latency, small enough not to double a model's memory."""

_STORE_BACKLOG = 1024

_LEAVE_TIMEOUT = timedelta(seconds=10)
"""Longest wait of a rank whose engine failed for rank 0 to fail too."""


def serve_store(address: str, port: int, timeout_s: float, clients: int | None = None) -> Any:
    """Serve a torch store at ``address`` alone, where torch's own servers listen on all; with ``clients`` it waits for
    that many, this process included. Raises as :func:`listening_socket` does, or torch's DistError if they are late."""
    with listening_socket(address, _STORE_BACKLOG, port) as listening:
        return dist.TCPStore(
            address,
            int(listening.getsockname()[1]),
            clients,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=clients is not None,
            multi_tenant=True,  # a later group of this process may meet here too
            master_listen_fd=listening.detach(),
        )


def meet_at_store(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return the ranks' store, at rank 0, once all of them have connected."""
    if rank == 0:
        return serve_store(address, port, timeout_s, world_size)
    deadline_s = time.monotonic() + timeout_s
    wait_until_listening(address, port, timeout_s)  # torch's own client tries again after half a second and more
    left_s = max(deadline_s - time.monotonic(), 1.0)
    return dist.TCPStore(address, port, world_size, is_master=False, timeout=timedelta(seconds=left_s))


def use_interface_towards(address: str) -> None:
    """Let gloo listen on the interface that reaches ``address``, and nccl too if that is loopback. Gloo would use the
    address of this node's name, which other nodes may not reach, and nccl never uses loopback. Variables that are set
    already stay."""
    if interface := interface_towards(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine, from :meth:`connect`, which every rank calls, to :meth:`close`."""

    rank: int = 0
    world_size: int = 1
    owns_group: bool = False  # the process group was made here, so it is destroyed here
    timeout_s: float = 300.0  # of a collective

    @classmethod
    def connect(cls, rendezvous: Rendezvous, device: str = "cpu", always: bool = False) -> "Ranks":
        """Join the default process group, or use an existing one of the same shape (``torchrun``). A single rank needs
        one only with ``always``.

        Raises:
            EngineError: the ranks did not meet in time, or this process belongs to a group of another shape.
            InvalidJob: the address does not belong to rank 0's node.
        """
        rank, world_size = rendezvous.rank, rendezvous.world_size
        if world_size == 1 and not always:
            return cls()
        if dist.is_initialized():
            current = (dist.get_rank(), dist.get_world_size())
            if current != (rank, world_size):
                raise EngineError(
                    f"this process is already rank {current[0]} of {current[1]}, not {rank} of {world_size}"
                )
            return cls(rank, world_size, timeout_s=rendezvous.timeout_s)
        address, port, timeout_s = rendezvous.master_addr, rendezvous.master_port, rendezvous.timeout_s
        on_cuda = torch.device(device).type == "cuda"
        if on_cuda:
            use_device(device)
        use_interface_towards(address)
        try:
            store = dist.HashStore() if world_size == 1 else meet_at_store(address, port, rank, world_size, timeout_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            raise EngineError(
                f"rank {rank} of {world_size} could not connect to the other ranks at {address}:{port}: {error}"
            ) from error
        return cls(rank, world_size, owns_group=True, timeout_s=timeout_s)

    def set_timeout(self, *groups: Any) -> None:
        """Give other process groups this timeout; their default is half an hour."""
        for group in groups:
            _set_pg_timeout(timedelta(seconds=self.timeout_s), group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def sum_scalars(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Sum by name, in the order of the ranks; a rank may lack names."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(scalars)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def raise_any(self, error: str) -> None:
        """Raise the same ``EngineError`` on all ranks if ``error`` is not empty on some rank."""
        if message := join_rank_errors(self.gather(error)):
            raise EngineError(message)

    @contextmanager
    def close_on_failure(self) -> Iterator[None]:
        """Leave the group if the block fails, so that the ranks can join another one."""
        try:
            yield
        except BaseException as error:
            store = _get_default_store() if self.owns_group and self.rank else None
            self.close()
            if store is not None and isinstance(error, Exception):
                with suppress(RuntimeError):  # rank 0 has left: its store would take the ranks of another group
                    store.wait(["never set"], _LEAVE_TIMEOUT)
            raise

    def close(self) -> None:
        """Leave the group; the other ranks' later collectives fail."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def resolve_device(device: str) -> str:
    """Add the current device's number to ``cuda``."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def use_device(device: str) -> None:
    """Make an accelerator this thread's current one, which is the first by default: some CUDA calls name none."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(resolve_device(device))


def join_rank_errors(errors: Sequence[str]) -> str:
    """Join the errors of all ranks into one line; empty if there is none."""
    parts = [f"rank {rank}: {error}" if len(errors) > 1 else error for rank, error in enumerate(errors) if error]
    return "; ".join(parts)


def gather_parts(local: Any, group: Any) -> list[Any]:
    """Gather a tensor of the same shape from each rank of ``group``, without gradient."""
    local = local.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return parts


def gather_padded(local: Any, size: int, group: Any) -> Any:
    """Gather the rows of all ranks of ``group``, each padded with zeros to ``size``: ``[ranks * size, ...]``."""
    padded = local.new_zeros((size, *local.shape[1:]))
    padded[: len(local)] = local
    everyone = local.new_empty((size * dist.get_world_size(group), *local.shape[1:]))
    all_gather_single(everyone, padded, group=group)
    return everyone


def sum_tensors(tensors: Iterable[Any], group: Any) -> None:
    """Replace each tensor by its sum over a process group, in place; every rank gets the same bits."""
    for bucket in group_by_size(tensors, torch.Tensor.numel, BUCKET_ELEMENTS):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def group_by_size(items: Iterable[T], count: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Join consecutive items into groups of at most ``limit`` elements by ``count``; a larger item is alone."""
    group: list[T] = []
    elements = 0
    for item in items:
        if group and elements + count(item) > limit:
            yield group
            group, elements = [], 0
        group.append(item)
        elements += count(item)
    if group:
        yield group


def device_environment(settings: RolloutSettings, copies: int = 1) -> dict[str, str]:
    """Return this process's environment with only the devices of ``settings`` visible, for ``copies`` of its ranks:
    the backend numbers them from 0, in their order. Raises an ``EngineError`` if there are too few."""
    env, device = dict(os.environ), torch.device(settings.device)
    if device.type != "cuda":
        return env
    count, first = settings.tensor_parallel_size * copies, device.index or 0
    numbers = settings.devices or tuple(range(first, first + count))
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(numbers) < count or (visible and max(numbers[:count]) >= len(visible)):
        raise EngineError(
            f"the engine's {count} ranks need {count} devices from {settings.device} on, but {len(numbers)} are"
            f" given{f' and {len(visible)} are visible' if visible else ''}"
        )
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible[n] if visible else str(n) for n in numbers[:count])}
