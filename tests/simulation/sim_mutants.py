# SPDX-License-Identifier: Apache-2.0
"""Trying a seeded bug: the simulation first, then the unit tests, then more of the simulation."""

import signal
from collections.abc import Iterable
from types import FrameType

import sim_modules
import sim_specs
from mutations import MUTATIONS
from sim_job import run

FIRST_SEEDS = range(12)
MORE_SEEDS = (*range(12, 61), 699, 1193)
CPU_LIMIT_S = 20.0


class TooLong(Exception):
    """The bug makes something go on for ever."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def caught_by(name: str) -> str:
    """What sees the seeded bug ``name``, ``""`` when nothing does.

    Raises:
        LookupError: the source has changed, so that the bug cannot be put in.
    """
    loaded = sim_modules.load_all(MUTATIONS[name])
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        return _simulated(FIRST_SEEDS, loaded) or sim_specs.broken_by(loaded) or _simulated(MORE_SEEDS, loaded)
    except TooLong:
        return "it never ends"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _simulated(seeds: Iterable[int], loaded: dict) -> str:
    modules = sim_modules.by_last_name(loaded)
    for seed in seeds:
        try:
            run(seed, modules)
        except TooLong:
            raise
        except Exception as error:  # noqa: BLE001 -- a bug shows itself in any way
            return f"seed {seed}: {type(error).__name__}: {str(error)[:120]}"
    return ""
