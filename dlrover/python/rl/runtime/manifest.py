"""What a generation consists of: the file whose appearance makes it one."""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.runtime.state_file import StateFile, new_file

MANIFEST = "manifest.json"
"""The manifest's name inside its folder."""

VERSION = 1
"""Version of the manifest's format."""

_FOLDER = re.compile(r"step-(?P<step>\d{8,})\.e(?P<epoch>\d+)")
_LARGEST = 1 << 28


@dataclass(frozen=True)
class Manifest:
    """One generation: the state of every stateful member and of the trainer after ``step``.

    Attributes:
        step: the last step that is in it.
        epoch: the trainer's epoch that committed it.
        run: the run it belongs to.
        files: what it consists of, by a name the committer chose (``"ROLLOUT-0"``, ``"trainer"``).
        extra: further values of the committer's, as JSON has them.
        serial: rises with each commit in its folder; the highest is the newest.
        committed_at: when, in seconds since 1970.
    """

    step: int
    epoch: int
    run: str
    files: Mapping[str, StateFile]
    extra: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0
    committed_at: float = 0.0

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(self.step, self.epoch)


def folder_name(step: int, epoch: int) -> str:
    """The name of the folder of a generation."""
    return f"step-{step:08d}.e{epoch}"


def step_and_epoch(name: str) -> tuple[int, int] | None:
    """What :func:`folder_name` made ``name`` from; None for another name."""
    match = _FOLDER.fullmatch(name)
    return (int(match["step"]), int(match["epoch"])) if match else None


def encode(manifest: Manifest) -> bytes:
    """One JSON object: the manifest, and the crc32 of its text."""
    body = json.dumps({"version": VERSION, **asdict(manifest)}, sort_keys=True, allow_nan=False)
    return b'{"crc32": "%08x", "manifest": %s}\n' % (zlib.crc32(body.encode()), body.encode())


def decode(content: bytes) -> Manifest:
    """Read it back.

    Raises:
        ValueError: a byte is not as it was written.
    """
    fields = json.loads(content)["manifest"]
    version = fields.pop("version")
    if version != VERSION:
        raise ValueError(f"format {version!r} instead of {VERSION}")
    files = {name: StateFile(**file) for name, file in fields.pop("files").items()}
    manifest = Manifest(files=files, **fields)
    if encode(manifest) != content:  # more than the checksum: JSON has many spellings of one value
        raise ValueError("it does not match its checksum")
    return manifest


def read_manifest(folder: Path, run: str) -> Manifest:
    """The manifest in ``folder``.

    Raises:
        CheckpointMissing: there is none of this run.
        CheckpointCorrupt: it is damaged, or belongs to another folder.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST)
        manifest = decode(content)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissing(f"{path} is not there") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"not a manifest: {error}") from error
    if manifest.run != run:
        raise CheckpointMissing(f"{path} belongs to run {manifest.run}, not to {run}")
    if manifest.folder != folder.name:
        raise CheckpointCorrupt(str(path), f"it belongs to {manifest.folder}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest, durable: bool) -> None:
    """Make the files in ``folder`` a generation, for good when ``durable``, or leave no manifest and raise OSError."""
    path, content = folder / MANIFEST, encode(manifest)
    try:
        with new_file(path, durable, len(content)) as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)  # it may have its name already, while the name is not safe yet
        raise
