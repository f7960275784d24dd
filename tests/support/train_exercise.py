# SPDX-License-Identifier: Apache-2.0
"""The work of an engine's processes in the contract; they return values that the tests compare."""

import dataclasses
import hashlib
from itertools import pairwise

from dlrover.python.rl.common.progress import noted_progress
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from tests.support.plain_engine import CONFIG, STEPS, TEMPERATURE, EntropyLoss, make_batch

SAVED_AFTER = 2
BUDGET = 40
"""Tokens of a micro-batch: some steps have several, and not every rank as many."""


def make_engine(case, rank, port, path, frozen=False, timeout_s=240, memory=None, optimizer=CONFIG, **changes):
    settings = TrainSettings(max_tokens_per_microbatch=BUDGET, parallel=case.sizes, backend=case.backend)
    settings = dataclasses.replace(settings, **case.settings | changes)
    rendezvous = Rendezvous(rank, case.world_size, "127.0.0.1", port, timeout_s=timeout_s)
    optimizer = None if frozen else optimizer
    return engine_class(TRAIN_ENGINES, case.engine)(path, optimizer, settings, rendezvous, memory)


def replica_of(engine, rank):
    place = engine.layout.coordinates(rank)
    return place.ddp * engine.layout.shard + place.shard


def share(engine, rank, seed):
    """The rows of this rank's replica."""
    return make_batch(seed).split(engine.layout.data_parallel_size)[replica_of(engine, rank)]


def train(engine, rank, steps):
    return [engine.step(share(engine, rank, seed), EntropyLoss(), TEMPERATURE) for seed in steps]


def digest(engine):
    """Return a digest of every bit of this rank's state."""
    whole = hashlib.blake2b()
    for part in [*state_tree.dump(engine.state_dict())]:
        for piece in [part] if isinstance(part, bytes) else part:
            whole.update(bytes(piece))
    return whole.hexdigest()


def saved(state):
    """Return a state that has gone through bytes, as a commit goes."""
    skeleton, buffers = state_tree.dump(state)
    return state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])


def weights_of(engine):
    return {name: tensor.detach().to("cpu", copy=True).numpy() for name, tensor in engine.named_weights()}


def five_steps(rank, world_size, port, case, path, checkpoint):
    """Log-probs and entropies first, a checkpoint on the way, a trip to the host, and what came of it."""
    engine = make_engine(case, rank, port, path)
    noted = [noted_progress()]
    evaluated = engine.evaluate(share(engine, rank, 0), TEMPERATURE, entropy=True)
    noted.append(noted_progress())
    reports = train(engine, rank, range(SAVED_AFTER))
    noted.append(noted_progress())
    engine.save_checkpoint(checkpoint)
    reports += train(engine, rank, [SAVED_AFTER])
    digest(engine)  # A state that has been written does not keep its tensors from moving.
    before = engine.footprint()
    engine.cpu()
    places, empty = [engine.place()], engine.footprint()
    engine.cuda()
    places.append(engine.place())
    after = engine.footprint()
    reports += train(engine, rank, range(SAVED_AFTER + 1, STEPS))
    columns = ("logprobs", "entropy", "candidate_logprobs")
    result = {
        "replica": replica_of(engine, rank),
        **{name: [row.copy() for row in evaluated.ragged(name)] for name in columns},
        "steps": reports,
        "progress": [after - before for before, after in pairwise(noted)],
        "footprints": (before, empty, after),
        "places": places,
        "digest": digest(engine),
        "weights": weights_of(engine),
        "snapshot": sorted(engine.publish().buffers),
    }
    engine.close()
    return result


def go_on(rank, world_size, port, case, path, checkpoint, other):
    """Load this layout's checkpoint, and a single process's."""
    results = []
    engine = make_engine(case, rank, port, path)
    for folder in (checkpoint, other):
        train(engine, rank, [77])  # It may have gone on, and is taken back.
        engine.load_checkpoint(folder)
        reports = train(engine, rank, range(SAVED_AFTER, STEPS))
        results.append({"steps": reports, "digest": digest(engine), "weights": weights_of(engine)})
    engine.close()
    return results
