"""Where the executor puts processes; nothing of Ray runs."""

import asyncio

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.commands import KillStandby, StartMembers, StartStandby
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray.executor import RayExecutor

JOB = """
trainer: {{module: toys, class: Loop, device_per_node: 4, device_type: CPU}}
workload:
  actor: {{module: toys, class: Policy, num: 1, standby: {standby}}}
"""


class Taken:
    """An actor that is there."""

    def __init__(self, slot):
        self.slot = slot


class Stage:
    """An executor whose processes are made at once and never answer."""

    def __init__(self, monkeypatch, standby):
        job = load_job_text(JOB.format(standby=standby), "job")
        self.executor = RayExecutor(job, "run", plan(job), {}, None)
        self.slots, self.ended = [], []
        monkeypatch.setattr(self.executor._grounds, "options", self.options)
        monkeypatch.setattr(self.executor._fleet, "make_member", self.make)
        monkeypatch.setattr(self.executor, "_locate", self.locate)
        monkeypatch.setattr(self.executor, "_watch", lambda unit, emit: None)
        monkeypatch.setattr(self.executor, "_end", self.end)

    async def options(self, role, slot, excluded):
        return {}

    async def make(self, unit, placed):
        self.slots.append((str(unit.place), unit.number, unit.slot))
        return Taken(unit.slot)

    async def locate(self, unit):
        await asyncio.sleep(0)
        unit.process = Process(slot=unit.slot)
        await asyncio.Event().wait()

    async def end(self, unit):
        self.ended.append(unit.handle.slot)

    def run(self, *commands):
        async def carry_out():
            for command in commands:
                self.executor.execute(command, lambda event: None)
                for _ in range(20):
                    await asyncio.sleep(0)

        asyncio.run(carry_out())
        return self.slots


def member(number, **standbys):
    return StartMembers("ACTOR", ((0, number),), standbys={0: standbys["standby"]} if standbys else {})


def test_the_place_of_a_lost_standby_is_free_for_the_next(monkeypatch):
    stage = Stage(monkeypatch, standby=1)
    slots = stage.run(
        member(1),
        StartStandby("ACTOR", 0),
        KillStandby("ACTOR", 0),
        StartStandby("ACTOR", 1),
        member(2, standby=1),
        StartStandby("ACTOR", 2),
        member(3),  # the second one died before that was ready
    )
    assert slots == [
        ("ACTOR[0]", 1, 0),
        ("ACTOR-standby[0]", 0, 1),
        ("ACTOR-standby[1]", 0, 1),
        ("ACTOR-standby[2]", 0, 0),
        ("ACTOR[0]", 3, 1),
    ]
    assert stage.ended == [1, 0, 1]


def test_two_standbys_stand_beside_each_other(monkeypatch):
    stage = Stage(monkeypatch, standby=2)
    slots = stage.run(member(1), StartStandby("ACTOR", 0), StartStandby("ACTOR", 1))
    assert [slot for _, _, slot in slots] == [0, 1, 2]
    assert stage.ended == []
