# SPDX-License-Identifier: Apache-2.0
"""The end of a run in the memories of its nodes.

::

    each node    its processes are ended  -->  the commits that it knows of
    each node    copies what it has of the newest to the job's directory; the last to be ready finds it complete
    each node    removes the run's files
"""

import asyncio
from collections.abc import Mapping, Sequence

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory, known_in_memory, save_from_memory
from dlrover.python.rl.runtime.checkpoint.storage.manifest import decode
from dlrover.python.rl.runtime.ray.cluster.api import ClusterApi, kill_and_wait

_LOG = get_logger(__name__)

_RELEASED_S = 5.0
_SAVED_S = 900.0


async def forget_on_nodes(cluster: ClusterApi, pids: Mapping[str, Sequence[int]], job: str, run: str) -> bool:
    """End the processes ``pids`` of each node and remove the run's commits from its memory. The newest that is whole
    and goes beyond the copies in the run's folder is saved before. Returns False if that failed: an error is logged,
    and everything stays."""
    ended = (cluster.run_on(node, _end_and_list, pids[node], job, run, limit_s=_SAVED_S) for node in pids)
    known = dict(zip(pids, await asyncio.gather(*ended), strict=True))
    answering = [node for node, found in known.items() if found is not None]
    found = {decode(each).age: each for node in answering for each in known[node]}  # two nodes know the same ones
    for _, each in sorted(found.items(), reverse=True):
        saving = (cluster.run_on(node, save_from_memory, job, run, each, limit_s=_SAVED_S) for node in answering)
        saved = await asyncio.gather(*saving)
        if any(saved):
            break
        if None in saved:
            _LOG.error("%s: step %d stays in the memory of its nodes", job, decode(each).step)
            return False
        _LOG.error("%s: step %d is lost with the nodes that had parts of it", job, decode(each).step)
    await asyncio.gather(*(cluster.run_on(node, _forget, job, run, limit_s=_SAVED_S) for node in pids))
    return True


def _end_and_list(pids: Sequence[int], job: str, run: str) -> list[bytes]:
    kill_and_wait(pids)
    return known_in_memory(job, run)


def _forget(job: str, run: str) -> None:
    forget_memory(job, run, patience_s=_RELEASED_S)
