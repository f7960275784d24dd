# SPDX-License-Identifier: Apache-2.0
"""The faults there are, and the plan of a run: which strike, and when. All of it follows from the seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The faults that a run meets."""

    KILL_ACTOR = "kill actor"
    KILL_ROLLOUT = "kill rollout"
    KILL_REWARD = "kill reward"
    KILL_TRAINER = "kill trainer"
    KILL_MASTER = "kill master"
    KILL_STANDBY = "kill standby"
    HANG_ACTOR = "hang actor"
    HANG_ROLLOUT = "hang rollout"
    HANG_REWARD = "hang reward"
    HANG_TRAINER = "hang trainer"
    CUT_RECEIVE = "kill rollout in weight sync"
    CUT_PUBLISH = "kill actor in weight sync"
    NAN_LOSS = "NaN loss"
    FLIP_MEMORY = "bit flip in newest commit"
    TEAR_MEMORY = "torn file in newest commit"
    FLIP_DURABLE = "bit flip in checkpoint"
    TEAR_DURABLE = "torn file in checkpoint"
    TEAR_JOURNAL = "torn journal, master killed"
    FULL_DISK = "full disk"
    KILL_GCS = "kill GCS"
    KILL_RAYLET = "kill raylet"
    KILL_NODE = "node loses power"
    CUT_NODE = "partition of a node"
    PAUSE_MASTER = "pause of the master"
    PAUSE_GCS = "pause of the GCS"
    PAUSE_RAYLET = "pause of a raylet"


HARMLESS = frozenset({Kind.PAUSE_MASTER, Kind.PAUSE_GCS, Kind.PAUSE_RAYLET, Kind.FLIP_DURABLE, Kind.TEAR_DURABLE})
"""Nothing is lost by these: whatever the master reports as lost is a false alarm."""

CORRUPTING = frozenset({Kind.FLIP_MEMORY, Kind.TEAR_MEMORY})
"""After these the newest commit cannot be read, and the step before it is the last."""

NODE_LOSSES = frozenset({Kind.KILL_RAYLET, Kind.KILL_NODE, Kind.CUT_NODE})

QUICK = {Kind.KILL_ACTOR, Kind.KILL_ROLLOUT, Kind.KILL_REWARD, Kind.KILL_TRAINER, Kind.KILL_MASTER, Kind.KILL_GCS}
QUICK |= {Kind.HANG_ACTOR, Kind.HANG_ROLLOUT, Kind.HANG_REWARD, Kind.HANG_TRAINER}
"""Done by one signal, at a time of one's choosing: these strike while another fault is being recovered."""

_RARE = frozenset({*NODE_LOSSES, Kind.FULL_DISK, Kind.KILL_GCS, Kind.PAUSE_GCS, Kind.PAUSE_RAYLET, Kind.PAUSE_MASTER})
_OVERLAPPING = 40
"""Percent that strike during another recovery: a third, and some to spare for recoveries that are over by then."""

_LATEST_S = 0.3
_FIRST_STEP = 2
_LAST_STEPS = 3


@dataclass(frozen=True)
class Planned:
    """One fault."""

    kind: Kind
    after_s: float
    pick: int


@dataclass(frozen=True)
class Burst:
    """Faults that strike within a second of each other, once ``step`` is committed."""

    step: int
    faults: tuple[Planned, ...]


def schedule(seed: int, faults: int, steps: int, kinds: Sequence[Kind] = tuple(Kind)) -> tuple[Burst, ...]:
    """The plan of a run: a third overlapping, the others of each kind at least once where they are enough for that, the
    bursts spread evenly over the steps.
    """
    chance = random.Random(f"chaos-{seed}")
    quick = [kind for kind in kinds if kind in QUICK]
    overlapping = -(-faults * _OVERLAPPING // 100) if quick else 0
    every, count = list(kinds), faults - overlapping
    chance.shuffle(every)
    weights = [1 if kind in _RARE else 3 for kind in kinds]
    first = [*every[:count], *chance.choices(kinds, weights, k=max(count - len(every), 0))]
    chance.shuffle(first)
    sizes = [1] * len(first)
    lasting = [at for at, kind in enumerate(first) if kind not in HARMLESS] or list(range(len(first)))
    for _ in range(overlapping):
        sizes[min(chance.sample(lasting, min(2, len(lasting))), key=lambda at: sizes[at])] += 1
    room = steps - _LAST_STEPS - _FIRST_STEP
    if room < len(first):
        raise ValueError(f"{len(first)} bursts do not fit {steps} steps: at least {len(first) + 5} are needed")
    return tuple(
        Burst(_FIRST_STEP + at * room // len(first), tuple(_burst(chance, kind, sizes[at], quick)))
        for at, kind in enumerate(first)
    )


def _burst(chance: random.Random, first: Kind, size: int, quick: Sequence[Kind]) -> Iterator[Planned]:
    yield Planned(first, 0.0, chance.randrange(1 << 30))
    for _ in range(size - 1):
        yield Planned(chance.choice(quick), round(chance.uniform(0.0, _LATEST_S), 3), chance.randrange(1 << 30))
