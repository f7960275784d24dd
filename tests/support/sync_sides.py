# SPDX-License-Identifier: Apache-2.0
"""Both sides of a sync, in one process or in several: sources to send, transports by name, processes to kill."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_lock import DeviceTurns
from dlrover.python.rl.engine.weight_sync.base import Seal, SyncSettings
from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.engine.weight_sync.transports import make_transport
from tests.support.processes import FORKED

LATEST_S = 240.0
PATIENT = SyncSettings(name="ACTOR[0]", timeout_s=20.0, bucket_bytes=4096)

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)

KINDS = ("broadcast", "cuda_ipc", "pull", "pull_copied")


def transport(kind, settings=PATIENT):
    """A transport by the name that the tests give it."""
    if kind == "adapters":
        return make_transport("pull", {}, settings)
    if kind == "pull_copied":
        return PullTransport(settings, maps_pages=False)
    return {"broadcast": BroadcastTransport, "cuda_ipc": CudaIpcTransport}.get(kind, PullTransport)(settings)


def toy_weights(seed=0):
    """About 90 kB under names, shapes and dtypes of every kind that must pass."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "embed": draw(64, 48),
        "scalar": torch.tensor(7 + seed, dtype=torch.int64),
        "half": draw(33, 5).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "turned": draw(30, 70).T,
        "flags": torch.tensor([True, False, bool(seed % 2)]),
        "long": draw(17_003),
        "norm": draw(3),
    }


def turn_of(lock):
    """Have the device inside the block."""
    return DeviceTurns((lock,), leave=int, lingers=False).turn(LATEST_S)


class ToySource:
    """Something with weights; ``halt`` is called before each tensor with its number."""

    def __init__(self, weights, version, halt=lambda number: None):
        self.weights, self.version, self.halt, self.rounds = weights, version, halt, 0

    def named_weights(self):
        self.rounds += 1
        for number, item in enumerate(self.weights.items()):
            if self.rounds > 1:
                self.halt(number)
            yield item

    def stamp(self, kind="pull"):
        return stamp_by(kind, self.weights.items(), self.version)


def stamp_by(kind, named, version):
    """The stamp of these weights: the same by all transports, but for the one that leaves them on the device."""
    if kind != "cuda_ipc":
        return take_snapshot(named, version).stamp
    source, sender = ToySource(dict(named), version), CudaIpcTransport(SyncSettings())
    stamp = sender.send(sender.offer(source), source)
    sender.close()
    return stamp


class Wire:
    """The transports of a source and of its sinks, all in this process."""

    def __init__(self, kind, sinks=1, settings=PATIENT):
        settings = replace(settings, receivers=sinks)
        self.kind, self.source = kind, transport(kind, settings)
        more_settings = [replace(settings, name=f"ROLLOUT[{rank}]") for rank in range(sinks)]
        self.sinks = [transport(kind, other) for other in more_settings]

    def attempt(self, ticket, source, in_turn=False):
        """Both sides, at once where they can be: what sending and each receiving gave, or raised."""
        workers = 1 if in_turn else 1 + len(self.sinks)
        with ThreadPoolExecutor(workers) as pool:
            sending = pool.submit(self.source.send, ticket, source)
            receiving = [pool.submit(sink.receive, ticket) for sink in self.sinks]
            return [each.exception(LATEST_S) or each.result() for each in (sending, *receiving)]

    def sync(self, source):
        """One sync: the sender's stamp, and what each sink got."""
        stamp, *received = self.attempt(self.source.offer(source), source)
        for outcome in (stamp, *received):
            if isinstance(outcome, Exception):
                raise outcome
        return stamp, received

    def close(self):
        for each in (self.source, *self.sinks):
            each.close()


def publish(sender, source):
    """Offer and send; return the ticket and the stamp."""
    ticket = sender.offer(source)
    return ticket, sender.send(ticket, source)


def forged(monkeypatch, version):
    """Make senders of this process seal what they send as another version."""
    true = Seal.of

    def seal(ticket, crcs):
        seal = true(ticket, crcs)
        return seal._replace(stamp=replace(seal.stamp, version=version))

    monkeypatch.setattr(Seal, "of", seal)


def equal(snapshot, weights):
    """Return True if a snapshot has these weights, bit for bit."""
    same = [
        snapshot.tensor(name).dtype == tensor.dtype and torch.equal(snapshot.tensor(name), tensor)
        for name, tensor in weights.items()
    ]
    return all(same) and list(snapshot.buffers) == list(weights)


def step(engine, seed=0):
    generator = np.random.default_rng(seed)
    rows = [generator.integers(0, 256, 12) for _ in range(4)]
    tokens = Ragged.from_rows(rows)
    masks = Ragged.from_rows([np.arange(12) >= 4 for _ in rows])
    batch = Batch({"tokens": tokens, "action_mask": masks, "weight": np.full(4, 1 / 32, dtype=np.float32)})
    engine.step(batch, lambda logprobs, columns: (-(logprobs * columns["weight"]).sum(), {}))


def completions(engine):
    texts = ["a", "what is the answer?", "37+45="]
    prompts = {"prompt_id": np.arange(3), "tokens": Ragged.from_rows([list(text.encode()) for text in texts])}
    generated = engine.generate(Batch(prompts), GREEDY, (0,))
    return [row.tolist() for row in generated.ragged("tokens")], generated["version"].tolist()


def send_side(kind, pipe, seed, halt_at, versions=1):
    """A process that offers and sends; with ``halt_at`` it stops for ever before that tensor, and says so."""

    def halt(number):
        if number == halt_at:
            pipe.send("midway")
            time.sleep(LATEST_S)

    torch.set_num_threads(1)
    wire = transport(kind)
    for version in range(seed, seed + versions):
        source = ToySource(toy_weights(version), version=version, halt=halt)
        pipe.send(wire.offer(source))
        pipe.send(wire.send(pipe.recv(), source))
    pipe.recv()
    wire.close()


def receive_side(kind, pipe, device="cpu", keeps=False):
    """A process that receives whatever ticket comes, and sends the stamp or the error; it may keep what came."""
    torch.set_num_threads(1)
    pipe.send("up")
    wire = transport(kind, replace(PATIENT, name="ROLLOUT[0]", device=device))
    while (ticket := pipe.recv()) is not None:
        try:
            weights = wire.receive(ticket)
            pipe.send(weights.stamp)
            if not keeps:
                del weights
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send(error)


def rank_side(kind, pipe, model, place, name, settings, sinks=1, optimizer=None):
    """A rank of a train engine that divides its model; all ranks offer and send, the first one leads."""
    torch.set_num_threads(1)
    engine = engine_class(TRAIN_ENGINES, name)(model, optimizer, settings, place)
    wire = transport(kind, replace(PATIENT, is_leader=place.rank == 0, receivers=sinks))
    pipe.send(wire.offer(engine))
    pipe.send(wire.send(pipe.recv(), engine))
    pipe.recv()


def taking_rank_side(kind, pipe, model, place, settings):
    """A rank of a frozen engine that divides its model; all ranks receive and take their part. The first one tells
    which weights it has then, gathered again."""
    torch.set_num_threads(1)
    engine = Fsdp2TrainEngine(model, None, settings, place)
    wire = transport(kind, replace(PATIENT, name=f"ROLLOUT[{place.rank}]", receivers=place.world_size))
    pipe.send("up")
    engine.receive(wire.receive(pipe.recv()))
    weights = engine.publish()
    pipe.send(weights.stamp if place.rank == 0 else None)
    pipe.recv()


@contextmanager
def process(target, kind, *arguments):
    """A process and the pipe to it; killed at the end if it has not ended."""
    ours, child_end = FORKED.Pipe()
    child = FORKED.Process(target=target, args=(kind, child_end, *arguments))
    child.start()
    child_end.close()
    try:
        yield child, ours
    finally:
        if child.is_alive():
            child.kill()
        child.join(LATEST_S)
        ours.close()


def hear(pipe):
    """Return the pipe's next message."""
    assert pipe.poll(LATEST_S), "the other process is silent"
    return pipe.recv()


def kill(child):
    """End a process as a power cut would, and wait until it is gone."""
    os.kill(child.pid, signal.SIGKILL)
    child.join(LATEST_S)
    assert child.exitcode == -signal.SIGKILL
