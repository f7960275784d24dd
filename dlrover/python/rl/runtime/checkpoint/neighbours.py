# SPDX-License-Identifier: Apache-2.0
"""Commits in the memories of several nodes: what a node has is also on the next one, so a lost node loses no step.

::

    A --> B --> C --> A        the memories that workers see (memory_name), in a ring

    a commit     workers write their files --> parts of each go to the next node --> the trainer's file and manifest,
                 there and on the next node of the trainer's
    a recovery   files that a new worker's node lacks come from a node that has them
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.runtime.checkpoint.runs import TRAINER, Roots
from dlrover.python.rl.runtime.checkpoint.state_file import write_part, write_whole
from dlrover.python.rl.runtime.checkpoint.store import (
    NODES,
    CheckpointStore,
    Files,
    Manifest,
    Piece,
    decode,
    encode,
    write_manifest,
)
from dlrover.python.rl.trainer.port import Transfer

_LOG = get_logger(__name__)

_PART_BYTES = 1 << 28  # of a file that travels at once
Nodes = Mapping[ProcessId, str]  # the node of each worker


@dataclass(frozen=True)
class Part:
    """A part of a file in the memory of a node, from ``start``; steps before ``first_kept`` are not needed, except the
    one that is being copied. For a restore the copies are ``needed``: errors of the disk are retried."""

    roots: Roots
    piece: Piece
    start: int
    first_kept: int = 0
    copying: int | None = None
    needed: bool = False

    @property
    def nbytes(self) -> int:
        return min(_PART_BYTES, self.piece.file.nbytes - self.start)


@dataclass(frozen=True)
class Held:
    """A generation that a node knows: its manifest, and the trainer's file."""

    manifest: bytes
    trainer: bytes


def read(part: Part) -> Any:
    """Return an array of bytes; None if the file cannot be read."""
    folder, file = part.piece
    path = part.roots.commit_root() / folder / file.name
    load = partial(np.fromfile, path, np.uint8, part.nbytes, offset=part.start)
    try:
        return retry_io(load, path) if part.needed else load()
    except OSError as error:
        _LOG.warning("%s cannot be read: %s", path, error)
        return None


def store(part: Part | Roots, content: Any, node: str) -> bool:
    """Write a part of a file, or a :class:`Held` generation, to this ``node``'s memory. Returns False if that fails."""
    if content is None:
        return False
    try:
        if isinstance(part, Roots):
            return adopt(part.commit_store(node), content)
        commits = part.roots.commit_store(node)
        if node != part.roots.node:
            if part.copying is not None:
                commits.pinned.add(part.copying)  # by this node's own workers
            commits.drop_older(part.first_kept)
        write = partial(_write, commits, part, memoryview(content))
        if part.needed:
            retry_io(write, commits.root)
        else:
            write()
    except (OSError, CheckpointCorrupt, CheckpointMissing) as error:
        _LOG.warning("cannot store a neighbour's commit here: %s", error)
        return False
    return True


def _write(commits: CheckpointStore, part: Part, content: memoryview) -> None:
    folder, file = commits.root / part.piece.folder, part.piece.file
    folder.mkdir(mode=0o700, exist_ok=True)
    recycled = commits.spare(folder / file.name) if part.start == 0 else None
    write_part(folder, file, part.start, content, recycled)


def held(roots: Roots, node: str) -> list[Held]:
    """List the generations in the memory of this ``node`` that have the trainer's file. Raises OSError."""
    store = roots.commit_store(node)

    def read_all() -> list[Held]:
        generations = []
        for manifest in store.manifests():
            with suppress(FileNotFoundError):
                content = (store.root / manifest.folder / manifest.files[TRAINER].name).read_bytes()
                generations.append(Held(encode(manifest), content))
        return generations

    return retry_io(read_all, store.root)


def adopt(store: CheckpointStore, generation: Held) -> bool:
    """Add another node's generation unless it is damaged or quarantined. Raises OSError, CheckpointCorrupt."""
    try:
        manifest = decode(generation.manifest)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    if any(name.startswith(f"{manifest.folder}.") for name in store.damaged()):
        return False
    folder = store.root / manifest.folder
    folder.mkdir(mode=0o700, exist_ok=True)
    write_whole(folder, manifest.files[TRAINER], memoryview(generation.trainer))  # a replaced trainer may do the same
    write_manifest(folder, manifest, durable=False)
    return True


def copies_for_neighbours(
    roots: Roots, pieces: Mapping[ProcessId, Piece], nodes: Nodes, first_kept: int, copying: int | None = None
) -> list[Transfer]:
    """Return the transfers of each worker's file to the next node; ``copying``: the step whose copies go to job_dir."""
    following, on_node = _ring(nodes), _members_by_node(nodes)
    transfers = []
    for member, piece in pieces.items():
        neighbour = following.get(piece.file.node)
        if neighbour is not None:
            hosts = on_node[neighbour]
            target = hosts[member.rank % len(hosts)]
            transfers.append(Transfer(target, _parts(roots, piece, first_kept, copying), member))
    return transfers


def copy_for_neighbour(roots: Roots, store: CheckpointStore, manifest: Manifest, nodes: Nodes) -> list[Transfer]:
    """Return the transfer of the trainer's part of a commit to the next node."""
    on_node = _members_by_node(nodes)
    neighbour = _ring({**nodes, ProcessId("", 0): roots.node}).get(roots.node)
    if neighbour is None:
        return []
    content = (store.root / manifest.folder / manifest.files[TRAINER].name).read_bytes()
    return [Transfer(on_node[neighbour][0], (roots,), content=Held(encode(manifest), content))]


def transfers_to(roots: Roots, manifest: Manifest, members: Iterable[ProcessId], nodes: Nodes) -> list[Transfer]:
    """Return the transfers of the files that the nodes of ``members`` lack."""
    transfers = []
    for member in members:
        having = nodes_of(manifest, member.file_name)
        holders = [holder for holder, node in nodes.items() if node in having and holder != member]
        if holders and nodes.get(member) not in having:
            piece = Piece(manifest.folder, manifest.files[member.file_name])
            transfers.append(Transfer(member, _parts(roots, piece, needed=True), holders[0]))
    return transfers


def nodes_of(manifest: Manifest, name: str) -> list[str]:
    """Return the nodes that have all files of a process, ``[""]`` for every node, ``[]`` for no files."""
    nodes: list[str] = manifest.extra.get(NODES, {}).get(name, [])
    file = manifest.files.get(name)
    return nodes if nodes or file is None else [file.node]


def lost_files(manifest: Manifest, nodes: Collection[str]) -> list[str]:
    """Return the processes whose files are on none of the ``nodes``; files of copies are on every node."""
    everywhere = {*nodes, ""}
    names = [name for name in manifest.files if name != TRAINER]
    return [name for name in names if not everywhere.intersection(nodes_of(manifest, name))]


def nodes_by_process(files: Files, copied: Mapping[Transfer, str], before: Manifest | None) -> dict[str, list[str]]:
    """Return ``Manifest.extra[NODES]`` of the commit after ``before``; warns once of files that only one node has."""
    nodes_of_files = {name: [file.node] for name, file in files.items()}
    for transfer, node in copied.items():
        if transfer.source is not None:
            nodes_of_files[transfer.source.file_name].append(node)
    earlier = before.extra.get(NODES, {}) if before is not None else {}
    single = sorted(name for name, nodes in nodes_of_files.items() if len(nodes) == 1)
    if any(len(earlier.get(name, ())) != 1 for name in single):
        names = ", ".join(single)
        _LOG.warning("only one node has the commits of %s: losing it loses the steps since a copy", names)
    return nodes_of_files


def adopt_newest(store: CheckpointStore, by_node: Iterable[Sequence[Held]]) -> None:
    """Adopt the generations of the node that knows the newest one, unless ``store`` has it. Raises OSError."""
    best: Sequence[Held] = ()
    newest = max((each.age for each in store.manifests()), default=(0, 0))
    for generations in by_node:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            age = max((decode(each.manifest).age for each in generations), default=(0, 0))
            if age > newest:
                best, newest = generations, age
    for each in best:
        if adopt(store, each):
            _LOG.warning("step %d: the trainer's part comes from another node's memory", decode(each.manifest).step)


def _ring(nodes: Nodes) -> dict[str, str]:
    """Return the next node of each; empty if there is only one."""
    names = sorted(set(nodes.values()))
    return dict(zip(names, names[1:] + names[:1], strict=True)) if len(names) > 1 else {}


def _members_by_node(nodes: Nodes) -> dict[str, list[ProcessId]]:
    members: dict[str, list[ProcessId]] = {}
    for member, node in nodes.items():
        members.setdefault(node, []).append(member)
    return members


def _parts(
    roots: Roots, piece: Piece, first_kept: int = 0, copying: int | None = None, needed: bool = False
) -> tuple[Part, ...]:
    starts = range(0, piece.file.nbytes, _PART_BYTES)
    return tuple(Part(roots, piece, start, first_kept, copying, needed) for start in starts)
