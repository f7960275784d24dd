# SPDX-License-Identifier: Apache-2.0
"""The journal's file on a disk that is full, falters and loses its power, under a process that is killed."""

from random import Random

from dlrover.python.rl.runtime.checkpoint import journal_store
from tests.protocol.masters_disk import TRANSIENT, Disk, Killed

SEEDS, PROCESSES, APPENDS = 400, 5, 6


class Writer:
    """A master, one process after the other, and the lines that the journal has told it are safe."""

    def __init__(self, seed, folder):
        self.rng, self.path = Random(seed), folder / "journal.jsonl"
        self.disk = Disk(folder, self.rng, lambda: None)
        self.lines, self.pending, self.count, self.ends = [], [], 0, 0

    def disturb(self):
        self.disk.heal()
        fault = self.rng.choice(("kill", "kill", "full", "falter", "none"))
        if fault == "kill":
            self.disk.kill_in = self.rng.randint(1, 14)
        elif fault == "full":
            self.disk.room = self.rng.randint(0, 300)
        elif fault == "falter":
            self.disk.falter(self.rng.choice(TRANSIENT))

    def run(self):
        """Open the journal, which has all lines that are safe, and append some until the process ends."""
        try:
            store = journal_store.FileStateStore(self.path)
            self.take(store.read())
            for _ in range(APPENDS):
                self.pending = [b"%d %s" % (self.count + more, b"x" * 40) for more in range(self.rng.randint(1, 3))]
                self.count += 3
                self.append(store)
                self.take(store.read())
                assert not self.pending
                self.disturb()
        except (Killed, OSError):
            self.ends += 1

    def take(self, lines):
        """Check that all safe lines are there, and behind them only first ones of the pending lines."""
        safe, more = lines[: len(self.lines)], lines[len(self.lines) :]
        assert (safe, more) == (self.lines, self.pending[: len(more)])
        self.lines, self.pending = lines, self.pending[len(more) :]

    def append(self, store):
        """Try again while the disk fails, which it does for some time, if the process lives for so long."""
        while True:
            try:
                return store.append(*self.pending)
            except OSError:
                if self.rng.random() < 0.3:
                    raise
                if self.rng.random() < 0.3:
                    self.disk.heal()


def test_journal_after_kills_and_power_cuts_has_all_safe_lines(tmp_path, monkeypatch):
    ends = 0
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        writer = Writer(seed, folder)
        for name, value in writer.disk.patched().items():
            monkeypatch.setattr(journal_store, name, value, raising=False)
        for _ in range(PROCESSES):
            writer.disturb()
            writer.run()
            if writer.rng.random() < 0.5:
                writer.disk.power_fails()
        ends += writer.ends
    assert ends > SEEDS
