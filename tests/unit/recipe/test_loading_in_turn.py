# SPDX-License-Identifier: Apache-2.0
"""Roles whose ranks meet load one after the other: where they share devices, they would wait for each other."""

from types import SimpleNamespace

import pytest

from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.online.batch import AuxOutput
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    CriticWorkload,
    ReferenceWorkload,
    RolloutWorkload,
    ShardedReferenceWorkload,
)


class Group:
    """A role whose load ends when it is waited for."""

    def __init__(self, workload_class, members, events):
        self.workload_class, self.members, self.events = workload_class, members, events
        self.init_model = SimpleNamespace(options=lambda blocking: self.begin)

    def __len__(self):
        return self.members

    def begin(self):
        name = self.workload_class.__name__
        self.events.append(f"{name} begins")
        return SimpleNamespace(wait=lambda: self.events.append(f"{name} has ended"))


@pytest.mark.parametrize("second", [CriticWorkload, ShardedReferenceWorkload])
def test_a_second_role_that_meets_waits_for_the_first(second):
    events, trainer = [], GRPOTrainer.__new__(GRPOTrainer)
    for kind in (ActorWorkload, RolloutWorkload, second):
        trainer.begin_loading(Group(kind, 2, events))
    assert events == [
        "ActorWorkload begins",
        "RolloutWorkload begins",
        "ActorWorkload has ended",
        f"{second.__name__} begins",
    ]


@pytest.mark.parametrize(("second", "members"), [(ReferenceWorkload, 2), (ShardedReferenceWorkload, 1)])
def test_others_load_at_the_same_time(second, members):
    events, trainer = [], GRPOTrainer.__new__(GRPOTrainer)
    for kind, count in ((ActorWorkload, 2), (second, members)):
        trainer.begin_loading(Group(kind, count, events))
    assert events == ["ActorWorkload begins", f"{second.__name__} begins"]


@pytest.mark.parametrize(("kind", "waits"), [(ReferenceWorkload, False), (ShardedReferenceWorkload, True)])
def test_the_outputs_of_a_role_that_meets_are_there_before_another_is_called(kind, waits):
    events, trainer = [], GRPOTrainer.__new__(GRPOTrainer)

    def compute(*arguments):
        return SimpleNamespace(wait=lambda: events.append("waited"))

    group = Group(kind, 2, events)
    group.data_parallel_size, group.logprobs = 2, SimpleNamespace(options=lambda **_: compute)
    trainer.needed_outputs = [AuxOutput("reference", "logprobs", {"ref_logprobs": "float32"})]
    trainer.group = lambda role: group
    trainer.compute_aux_outputs(SimpleNamespace(shard_evenly=lambda parts: parts, scored=[1, 2], samples=None))
    assert events == ["waited"] * waits
