# SPDX-License-Identifier: Apache-2.0
"""The groups whose calls are raced, and what each of them can do.

Every side has ``size`` processes of one class, whose methods do nothing but take and give: ``nothing()``, ``take(x)``,
``double(x)``. A side calls all of them and waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray
import torch

from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

Array = np.ndarray[Any, np.dtype[np.float32]]


class Side(ABC):
    """One kind of group."""

    @abstractmethod
    def empty(self) -> object:
        """Call all workers without arguments."""

    @abstractmethod
    def broadcast(self, array: Array) -> object:
        """Give all of ``array`` to every worker."""

    @abstractmethod
    def shard(self, array: Array) -> Array:
        """Give every worker an equal part of the rows; the doubled parts, joined."""

    @abstractmethod
    def chain(self, array: Array) -> Array:
        """Call twice, the second time with the first call's results."""


# -- role groups ------------------------------------------------------------------------------------------------------


class Worker(BaseWorkload):
    """A worker of a role group."""

    def nothing(self) -> None:
        """Take nothing, give nothing."""

    def take(self, array: Array) -> int:
        """Give the number of rows."""
        return len(array)

    @trainer_invocation(post_func=np.concatenate)
    def double(self, array: Array) -> Array:
        """Give twice the array."""
        return 2 * array


class RoleGroupSide(Side):
    """The role group ``RG_ACTOR`` of a trainer."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.group = trainer.RG_ACTOR  # type: ignore[attr-defined]

    def empty(self) -> object:
        return self.group.nothing()

    def broadcast(self, array: Array) -> object:
        return self.group.take(Replicate(array))

    def shard(self, array: Array) -> Array:
        doubled: Array = self.group.double(Shard(array))
        return doubled

    def chain(self, array: Array) -> Array:
        first = self.group.double.options(blocking=False, post_func=None)(Shard(array))
        doubled: Array = self.group.double(first)
        return doubled


# -- Ray alone --------------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class _Plain:
    def nothing(self) -> None:
        pass

    def take(self, array: Array) -> int:
        return len(array)

    def double(self, array: Array) -> Array:
        return 2 * array


class RaySide(Side):
    """Ray's actors, called as by hand."""

    def __init__(self, size: int) -> None:
        self.actors = [_Plain.remote() for _ in range(size)]  # type: ignore[attr-defined]

    def empty(self) -> object:
        return ray.get([actor.nothing.remote() for actor in self.actors])

    def broadcast(self, array: Array) -> object:
        stored = ray.put(array)
        return ray.get([actor.take.remote(stored) for actor in self.actors])

    def shard(self, array: Array) -> Array:
        return np.concatenate(ray.get(self._double(np.array_split(array, len(self.actors)))))

    def chain(self, array: Array) -> Array:
        return np.concatenate(ray.get(self._double(self._double(np.array_split(array, len(self.actors))))))

    def _double(self, parts: list[Any]) -> list[Any]:
        return [actor.double.remote(part) for actor, part in zip(self.actors, parts, strict=True)]


# -- verl -------------------------------------------------------------------------------------------------------------


class VerlSide(Side):
    """verl's ``RayWorkerGroup``: ``ONE_TO_ALL`` and ``DP_COMPUTE_PROTO``; a chain passes ``DataProtoFuture``."""

    def __init__(self, size: int) -> None:
        from verl import DataProto
        from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from benchmarks._dispatch_verl import VerlWorker

        self._pack: Callable[[Array], Any] = lambda array: DataProto.from_single_dict({"x": torch.from_numpy(array)})
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        worker_class = RayClassWithInitArgs(cls=ray.remote(VerlWorker))
        self.group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker_class, device_name="cpu")

    def empty(self) -> object:
        return self.group.nothing()

    def broadcast(self, array: Array) -> object:
        return self.group.take(array)

    def shard(self, array: Array) -> Array:
        return self._unpack(self.group.double(self._pack(array)))

    def chain(self, array: Array) -> Array:
        return self._unpack(self.group.double(self.group.double_later(self._pack(array))))

    @staticmethod
    def _unpack(data: Any) -> Array:
        doubled: Array = data.batch["x"].numpy()
        return doubled


# -- OpenRLHF ---------------------------------------------------------------------------------------------------------


class OpenRLHFSide(Side):
    """OpenRLHF's ``RayActorGroup``; it has no call that takes pending results."""

    def __init__(self, size: int) -> None:
        from benchmarks._dispatch_openrlhf import OpenRLHFWorker, launcher

        # As many nodes with a process each: else it asks for GPUs.
        self.group = launcher.RayActorGroup(size, 1, ray.remote(OpenRLHFWorker), num_gpus_per_actor=0)
        self.size = size

    def empty(self) -> object:
        return ray.get(self.group.async_run_method("nothing"))

    def broadcast(self, array: Array) -> object:
        return ray.get(self.group.async_run_method("take", ray.put(array)))

    def shard(self, array: Array) -> Array:
        # A worker goes through its items one by one: each gets one, of all its rows.
        items = array.reshape(self.size, -1)
        return np.concatenate([item for items in self._double(items) for item in items]).reshape(array.shape)

    def chain(self, array: Array) -> Array:
        return self.shard(self.shard(array))

    def _double(self, items: Array) -> list[list[Array]]:
        doubled: list[list[Array]] = ray.get(self.group.async_run_method_batch("double", array=items))
        return doubled


PEERS: dict[str, type[Any]] = {"verl": VerlSide, "OpenRLHF": OpenRLHFSide}


def is_installed(peer: str) -> bool:
    return find_spec(peer.lower()) is not None
