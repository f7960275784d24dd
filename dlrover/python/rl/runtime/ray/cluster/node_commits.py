# SPDX-License-Identifier: Apache-2.0
"""The end of a run in the memories of its nodes.

::

    each node    its processes are ended  -->  the newest commit that it knows of
    each node    copies what it has of the newest one to the job's directory; the last to be ready finds it complete
    each node    removes the run's files
"""

import asyncio
from collections.abc import Mapping, Sequence

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory, newest_in_memory, save_from_memory
from dlrover.python.rl.runtime.checkpoint.storage.manifest import decode
from dlrover.python.rl.runtime.ray.cluster.api import ClusterApi, kill_and_wait

_LOG = get_logger(__name__)

_RELEASED_S = 5.0
_SAVED_S = 900.0


async def forget_on_nodes(cluster: ClusterApi, pids: Mapping[str, Sequence[int]], job: str, run: str) -> None:
    """End the processes ``pids`` of each node and remove the run's commits from its memory. One that goes beyond the
    copies in the run's folder is saved there before; it stays, and an error is logged, if that is not possible."""
    ended = (cluster.run_on(node, _end_and_find, pids[node], job, run) for node in pids)
    known = [found for found in await asyncio.gather(*ended) if found]
    newest = max(known, key=lambda found: decode(found[-1]).age, default=None)
    if newest is not None:
        saving = (cluster.run_on(node, save_from_memory, job, run, newest, limit_s=_SAVED_S) for node in pids)
        if not any(await asyncio.gather(*saving)):
            text = "%s: step %d stays in the memory of its nodes: not all of it could be saved"
            _LOG.error(text, job, decode(newest[-1]).step)
            return
    await asyncio.gather(*(cluster.run_on(node, _forget, job, run) for node in pids))


def _end_and_find(pids: Sequence[int], job: str, run: str) -> list[bytes]:
    kill_and_wait(pids)
    return newest_in_memory(job, run)


def _forget(job: str, run: str) -> None:
    forget_memory(job, run, patience_s=_RELEASED_S)
