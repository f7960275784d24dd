# SPDX-License-Identifier: Apache-2.0
"""The service with jobs in memory, while it is killed and connections break: what clients are told is one history."""

import random
import threading
import time
from dataclasses import dataclass

import pytest

from dlrover.python.rl.common.errors import JobConflict, ServiceError, UnknownJob
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobPhase
from tests.flaky_network import CuttingProxy
from tests.served import JOB, WITHIN_S, Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CLIENTS, OPERATIONS, NAMES = 4, 500, 6


@dataclass
class Told:
    """One operation of a client: when it was asked and answered, and the answer."""

    client: int
    kind: str
    name: str
    began_s: float
    ended_s: float
    run: str = ""
    revision: int = 0
    phase: str = ""
    refusal: str = ""
    token: str = ""


class Caller(threading.Thread):
    def __init__(self, number, address, token, seed):
        super().__init__(daemon=True)
        self.number, self.address, self.token, self.random = number, address, token, random.Random(seed)
        self.told, self.error = [], None

    def run(self):
        try:
            with ServiceClient(self.address, self.token, patience_s=60.0) as client:
                for at in range(OPERATIONS):
                    self.told.append(self.operate(client, at))
        except Exception as error:  # noqa: BLE001 -- told to the test, which fails
            self.error = error

    def operate(self, client, at):
        name = f"job-{self.random.randrange(NAMES)}"
        kind = self.random.choice(["submit", "submit", "stop", "get", "get"])
        told = Told(self.number, kind, name, time.time(), 0.0)
        try:
            if kind == "submit":
                told.token = f"token-{self.number}-{at}"
                job = client.submit(JOB, name=name, client_token=told.token)
            else:
                job = client.stop(name) if kind == "stop" else client.get(name)
            told.run, told.revision, told.phase = job.run, job.revision, phase_of(job).value
        except (JobConflict, UnknownJob) as error:
            told.refusal = type(error).__name__
        told.ended_s = time.time()
        return told


class Faults(threading.Thread):
    """Kills the service and cuts connections until it is over."""

    def __init__(self, service, proxy, seed):
        super().__init__(daemon=True)
        self.service, self.proxy, self.random = service, proxy, random.Random(seed)
        self.over, self.kills, self.cuts = threading.Event(), 0, 0

    def run(self):
        while not self.over.wait(self.random.uniform(0.2, 0.8)):
            if self.random.random() < 0.3:
                self.service.kill()
                self.kills += 1
                self.service.start()
            else:
                self.proxy.cut()
                self.cuts += 1


@pytest.mark.parametrize("seed", [1, 2])
def test_the_history_of_each_job_is_linearizable(tmp_path, seed):
    service = Service(tmp_path, steps=5, step_s=0.02)
    service.start()
    proxy = CuttingProxy(service.port, seed)
    faults = Faults(service, proxy, seed)
    address = f"127.0.0.1:{proxy.port}"
    callers = [Caller(number, address, service.token, seed * 100 + number) for number in range(CLIENTS)]
    faults.start()
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(400)
    faults.over.set()
    faults.join(30)
    proxy.close()
    assert [caller.error for caller in callers] == [None] * CLIENTS
    told = sorted((each for caller in callers for each in caller.told), key=lambda each: each.ended_s)
    assert len(told) == CLIENTS * OPERATIONS and faults.kills >= 3 and faults.cuts >= 5
    with service.client(patience_s=WITHIN_S) as client:
        events = list(client.watch(follow=False))
    service.stop()
    check_events(events)
    check_answers(told, events)
    check_tokens(told, events)


def check_events(events):
    """Without gaps; a name has one job at a time, which ends once."""
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    running, ended = {}, set()
    for event in events:
        if event.kind == "submitted":
            assert event.name not in running, f"{event.name} has two jobs at event {event.number}"
            running[event.name] = event.run
        assert running.get(event.name) == event.run and event.run not in ended, event
        if JobPhase(phase_of_event(event)).ended:
            ended.add(running.pop(event.name))


def phase_of_event(event):
    return phase_of(event).value


def check_answers(told, events):
    """Each answer is a state that the log has, no older than any answer of that name before it was asked; a refusal is
    true at a moment between question and answer."""
    by_number = {event.number: event for event in events}
    spans = spans_of(events)
    seen = {}  # name to [(when it was told, revision)]
    for each in told:
        if each.refusal:
            is_true = any(
                begin <= each.ended_s + 1 and each.began_s - 1 <= end for begin, end in spans.get(each.name, ())
            )
            if each.refusal == "JobConflict":
                assert is_true, each
            else:
                assert not any(begin < each.began_s - 1 for begin, _ in spans.get(each.name, ())), each
            continue
        event = by_number[each.revision]
        assert (event.run, event.name) == (each.run, each.name), each
        assert each.phase == phase_of_event(event) or each.phase == "queued", (each, event)
        earlier = [revision for ended_s, revision in seen.get(each.name, []) if ended_s < each.began_s]
        if each.kind != "submit":
            assert each.revision >= max(earlier, default=0), each
        seen.setdefault(each.name, []).append((each.ended_s, each.revision))


def spans_of(events):
    """Name to the times in which it had a job that had not ended."""
    begun, spans = {}, {}
    for event in events:
        if event.kind == "submitted":
            begun[event.run] = event.at_s
        if JobPhase(phase_of_event(event)).ended:
            spans.setdefault(event.name, []).append((begun.pop(event.run), event.at_s))
    for event in events:
        if event.run in begun:
            spans.setdefault(event.name, []).append((begun.pop(event.run), float("inf")))
    return spans


def check_tokens(told, events):
    """One job for each token that was answered with one, and none twice."""
    runs = {each.token: each.run for each in told if each.token and each.run}
    submitted = [event.run for event in events if event.kind == "submitted"]
    assert len(set(runs.values())) == len(runs) and len(set(submitted)) == len(submitted)
    assert set(runs.values()) == set(submitted), "a job that nobody was told of, or the reverse"


def test_without_the_check_of_tokens_a_repeated_submission_would_be_seen(tmp_path):
    """The checks above can fail: a log with two jobs of one name at once, and an answer from the past."""
    with pytest.raises(AssertionError, match="has two jobs"):
        check_events([event_of(1, "a", "x"), event_of(2, "a", "y")])
    events = [event_of(1, "a", "x"), event_of(2, "a", "x", "running")]
    late = [Told(0, "get", "a", 1, 2, "x", 2, "running"), Told(1, "get", "a", 3, 4, "x", 1, "queued")]
    with pytest.raises(AssertionError):
        check_answers(late, events)


def event_of(number, name, run, phase="queued"):
    from dlrover.python.rl.service.jobs.records import JobEvent
    from dlrover.python.rl.service.messages import event_message

    kind = "submitted" if phase == "queued" else phase
    return event_message(JobEvent(number, float(number), name, run, kind, phase=JobPhase(phase)))


def test_a_service_that_is_gone_is_an_error_in_time():
    began_s = time.monotonic()
    with ServiceClient("127.0.0.1:1", "token", patience_s=1.0) as client, pytest.raises(ServiceError):
        client.get("job")
    assert time.monotonic() - began_s < 15
