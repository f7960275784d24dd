# SPDX-License-Identifier: Apache-2.0
"""The engines and layouts that the contract runs on. Another engine plugs in with a line of :data:`ENGINES`."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from dlrover.python.rl.engine.api.settings import ParallelSizes

HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Case:
    """One engine in one layout."""

    engine: str
    world_size: int = 1
    sizes: ParallelSizes = ParallelSizes()
    backend: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self):
        sizes = {"ddp": self.sizes.ddp_size, "tp": self.sizes.tensor_parallel_size}
        sizes |= {"cp": self.sizes.context_parallel_size, "pp": self.sizes.pipeline_parallel_size}
        options = [f"{key}{value}" for key, value in self.backend.items() if key != "cpu_shim"]
        words = [f"{key}{size}" for key, size in sizes.items() if size > 1] + options + [*self.settings.values()]
        return "-".join([self.engine, str(self.world_size), *words])


@dataclass(frozen=True)
class Engine:
    """The marks and cases of an engine of the registry."""

    marks: list[pytest.MarkDecorator]
    cases: list[Case]


def sizes(tensor, pipeline):
    return ParallelSizes(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def legal_sizes(world_size):
    """Every way to divide the ranks that the model's heads allow; what is left over shards."""
    numbers = range(1, world_size + 1)
    for ddp, tensor, context in product(numbers, repeat=3):
        fits = world_size % (ddp * tensor * context) == 0
        if fits and KV_HEADS % tensor == 0 and (HEADS // tensor) % context == 0:
            yield ParallelSizes(ddp, tensor, context)


FSDP2 = [Case("fsdp2", world, sizes) for world in (1, 2, 4) for sizes in legal_sizes(world)]
ON_HOST = {"optimizer_on_host": True}
FSDP2 += [Case("fsdp2", 2, sizes, ON_HOST) for sizes in legal_sizes(2)]
DEEPSPEED = [(world, ParallelSizes(), {"zero_stage": stage}) for stage in (1, 2, 3) for world in (1, 2)]
DEEPSPEED += [(2, ParallelSizes(), {"zero_stage": stage} | ON_HOST) for stage in (1, 2, 3)]
SHIM = {"cpu_shim": True}
MEGATRON = [
    Case("megatron", tensor * pipeline * copies, sizes(tensor, pipeline), SHIM)
    for tensor, pipeline, copies in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2))
]

ENGINES = {
    "fsdp2": Engine([], FSDP2),
    "deepspeed": Engine([pytest.mark.needs("deepspeed")], [Case("deepspeed", *case) for case in DEEPSPEED]),
    "megatron": Engine([pytest.mark.needs("megatron")], MEGATRON),
}


def is_slow(case):
    return case.world_size > 2 or is_on_host(case)


def is_on_host(case):
    return case.backend.get("optimizer_on_host", False)


def parameters(slow=is_slow, only=lambda case: True):
    """The cases as what a test is parametrised with."""
    return [as_parameter(case, slow(case)) for engine in ENGINES.values() for case in filter(only, engine.cases)]


def as_parameter(case, slow=False):
    return pytest.param(case, id=case.name, marks=[*ENGINES[case.engine].marks, *([pytest.mark.slow] * slow)])


def named(name):
    """The case of this name."""
    return next(case for engine in ENGINES.values() for case in engine.cases if case.name == name)
