# SPDX-License-Identifier: Apache-2.0
"""A cluster that a master which has been replaced cannot change any more.

A master that was frozen, for example in the middle of a release, would otherwise go on with it when it is thawed, and
end the processes of the one that has taken over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from dlrover.python.rl.runtime.ray.cluster.api import REMOTE_S, ActorRequest, ClusterApi, GroupRow
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow


@dataclass(frozen=True)
class FencedCluster:
    """Implements :class:`ClusterApi`; ``check`` is called before anything is changed, and does not return in a process
    that has been replaced."""

    cluster: ClusterApi
    check: Callable[[], None]

    def list_actors(self, prefix: str) -> list[str]:
        return self.cluster.list_actors(prefix)

    def find_actor(self, name: str) -> Any:
        return self.cluster.find_actor(name)

    def start_actor(self, request: ActorRequest) -> Any:
        self.check()
        return self.cluster.start_actor(request)

    def kill_actor(self, handle: Any) -> None:
        self.check()
        self.cluster.kill_actor(handle)

    async def until_ended(self, handle: Any) -> RayActorError:
        return await self.cluster.until_ended(handle)

    def list_groups(self) -> list[GroupRow]:
        return self.cluster.list_groups()

    def create_group(self, bundles: Sequence[Mapping[str, float]], name: str, excluded: tuple[str, ...] = ()) -> str:
        self.check()
        return self.cluster.create_group(bundles, name, excluded)

    def remove_group(self, group: str) -> None:
        self.check()
        self.cluster.remove_group(group)

    def free_resources(self) -> dict[str, float]:
        return self.cluster.free_resources()

    def list_nodes(self) -> list[NodeRow]:
        return self.cluster.list_nodes()

    async def run_on(self, node: str, function: Callable[..., Any], *arguments: Any, limit_s: float = REMOTE_S) -> Any:
        self.check()
        return await self.cluster.run_on(node, function, *arguments, limit_s=limit_s)
