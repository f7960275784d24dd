# SPDX-License-Identifier: Apache-2.0
"""A weight transport through safetensors files in a folder that all workers see."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp, take_snapshot
from dlrover.python.rl.engine.weight_sync.base import SenderBase, SyncSettings, Ticket, WeightSource

FOLDER = Path("runs/weights")


class FileTransport(SenderBase):
    """``SenderBase`` offers the weights: it writes the ticket with their names, shapes and version."""

    def __init__(self, settings: SyncSettings) -> None:
        super().__init__(settings)
        FOLDER.mkdir(parents=True, exist_ok=True)

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        snapshot = take_snapshot(source.named_weights(), source.version)  # all ranks gather
        if not self.settings.is_leader:
            return None
        path = self._path(ticket)
        partial = path.with_suffix(".partial")
        save_file({name: snapshot.tensor(name).clone() for name in snapshot.buffers}, partial)
        partial.replace(path)  # a receiver sees the whole file or none
        return snapshot.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        path = self._path(ticket)
        if not path.exists():
            raise WeightSyncError(f"there is no {path}")
        return take_snapshot(load_file(path).items(), ticket.version)

    def close(self) -> None:
        pass

    def _path(self, ticket: Ticket) -> Path:
        return FOLDER / f"{self.settings.channel}-{ticket.version}.safetensors"
