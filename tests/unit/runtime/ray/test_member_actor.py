# SPDX-License-Identifier: Apache-2.0
"""The actor of a worker: its heartbeats, the answers to them, and the settings of its process."""

import os
from types import SimpleNamespace

import pytest
import ray

from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat
from dlrover.python.rl.runtime.ray.processes import member
from dlrover.python.rl.runtime.ray.processes.member import WITHOUT_WATCHDOG, MemberActor, send_to
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext

WATCHDOG, OFF = WITHOUT_WATCHDOG
FIRST = ProcessId("ACTOR", 0)
JOB = f"""
trainer: {{module: toys, class: Loop, device_per_node: 1, device_type: CPU}}
workload:
  actor: {{module: {__name__}, class: Staying}}
"""


class Staying(BaseWorkload):
    @classmethod
    def keeps_process(cls, config):
        return True

    def hello(self):
        return "hello"


@pytest.fixture
def actor(monkeypatch, tmp_path):
    monkeypatch.setattr(member, "configure_logging", lambda process: None)
    monkeypatch.setattr(member, "reserved_devices", tuple)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return MemberActor(FIRST, 1, "master", None)


def start(actor, tmp_path):
    job = load_job_text(f"{JOB}job_dir: {tmp_path}\n", "job")
    actor.dlrover_start(job, MemberContext(role=RLRoleType.ACTOR), 1)


@pytest.mark.parametrize(
    ("answer", "is_current", "calls"),
    [
        (BeatAnswer.CURRENT, True, []),
        (BeatAnswer.WITHOUT_SECRETS, True, ["revealed"]),
        (BeatAnswer.PEER_LOST, True, [3]),
        (BeatAnswer.REPLACED, False, []),
    ],
)
def test_answer_to_a_heartbeat_ends_only_a_replaced_process(monkeypatch, answer, is_current, calls):
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    noted = []
    master = SimpleNamespace(
        beat=SimpleNamespace(remote=lambda beat: answer),
        reveal=SimpleNamespace(remote=lambda secrets: noted.append("revealed")),
    )
    assert send_to(master, noted.append)(Heartbeat(FIRST, 3)) is is_current
    assert noted == calls


@pytest.mark.parametrize(("setting", "value"), [("", OFF), ("1", "1")])
def test_watchdog_is_off_unless_the_user_has_set_it(actor, tmp_path, setting, value):
    os.environ.pop(WATCHDOG, None)
    if setting:
        os.environ[WATCHDOG] = setting
    start(actor, tmp_path)
    assert os.environ[WATCHDOG] == value


def test_heartbeat_of_an_idle_member_has_the_notice(actor, tmp_path):
    actor._notice = SimpleNamespace(read=lambda: "the node will go")
    start(actor, tmp_path)
    beat = actor._beat()
    assert (beat.method, beat.notice, beat.work) == ("", "the node will go", actor._host.work)


def test_call_to_any_incarnation_reaches_a_process_that_stayed(actor, tmp_path):
    start(actor, tmp_path)
    actor.dlrover_leave()
    start(actor, tmp_path)
    assert actor.dlrover_invoke(CallHeader((1, 0), "hello", incarnation=0).pack()) == "hello"
