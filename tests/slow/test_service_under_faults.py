# SPDX-License-Identifier: Apache-2.0
"""The service with jobs in memory, while it is killed and connections break: what clients are told is one history."""

import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from dlrover.python.rl.common.errors import CallError, JobConflict, UnknownJob
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobEvent, JobPhase
from dlrover.python.rl.service.messages import event_message
from tests.support.flaky_network import CuttingProxy
from tests.support.served import JOB, WITHIN_S, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CLIENTS, OPERATIONS, NAMES = 4, 500, 6
STOP_S = 5.0


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
        name, token = f"job-{self.random.randrange(NAMES)}", f"token-{self.number}-{at}"
        kind = self.random.choice(["submit", "submit", "submit", "again", "stop", "stop", "get", "get", "get"])
        if kind == "again":
            kind, earlier = "submit", [(before.name, before.token) for before in self.told if before.token]
            name, token = self.random.choice(earlier) if earlier else (name, token)
        answer_row = Told(self.number, kind, name, time.time(), 0.0, token=token if kind == "submit" else "")
        submit = {"name": name, "client_token": token}
        try:
            job = client.submit(JOB, **submit) if kind == "submit" else getattr(client, kind)(name)
            answer_row.run, answer_row.revision, answer_row.phase = job.run, job.revision, phase_of(job).value
        except (JobConflict, UnknownJob, CallError) as error:
            answer_row.refusal = type(error).__name__
        answer_row.ended_s = time.time()
        return answer_row


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
def test_history_of_each_job_is_linearizable(tmp_path, seed):
    with serving(tmp_path, steps=5, step_s=0.02) as service:
        answers = told_under_faults(service, seed)
        with service.client(patience_s=WITHIN_S) as client:
            stopping = [job.name for job in client.list_jobs() if phase_of(job) is JobPhase.STOPPING]
            assert all(phase_of(client.wait(name, STOP_S)).ended for name in stopping), stopping
            events = list(client.watch(follow=False))
    check_events(events)
    check_answers(answers, events)
    check_tokens(answers, events)


def told_under_faults(service, seed):
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
    answers = [each for caller in callers for each in caller.told]
    assert len(answers) == CLIENTS * OPERATIONS and faults.kills >= 3 and faults.cuts >= 5
    return answers


RANK = {"queued": 0, "starting": 1, "running": 2, "stopping": 3, "finished": 4, "failed": 4, "stopped": 4}


def check_events(events):
    """Check that events have no gaps, and that a name has one job at a time, which only goes forward and ends once."""
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    running, rank = {}, {}
    for event in events:
        if event.kind == "submitted":
            assert event.name not in running, f"{event.name} has two jobs at event {event.number}"
            assert event.run not in rank, f"{event.run} is submitted twice"
            running[event.name], rank[event.run] = event.run, 0
        assert running.get(event.name) == event.run, f"{event.run} has ended, or not begun, at event {event.number}"
        phase = phase_of(event).value
        assert RANK[phase] >= rank[event.run], f"{event.run} goes back to {phase} at event {event.number}"
        rank[event.run] = RANK[phase]
        if JobPhase(phase).ended:
            del running[event.name]


def check_answers(answered, events):
    """Each answer is a value that the log has, not from the future, and no older than any that was answered before it
    was asked; a refusal is true at a moment between question and answer."""
    by_number, spans = {event.number: event for event in events}, spans_of(events)
    latest = Counter()  # of a name and of a run: the last event that a client was told of
    stopped = set()  # runs whose stop was acknowledged
    questions, answers = [(one.began_s, False, one) for one in answered], [(one.ended_s, True, one) for one in answered]
    for _, is_answer, each in sorted(questions + answers, key=lambda point: point[:2]):
        if is_answer and each.run:
            for key in (each.name, each.run):
                latest[key] = max(latest[key], each.revision)
            if each.kind == "stop":
                stopped.add(each.run)
        elif not is_answer and each.run:
            check_answer(each, by_number[each.revision], latest, each.run in stopped)
        elif not is_answer:
            check_refusal(each, events, spans[each.name], latest[each.name])


def check_answer(each, event, latest, is_stopped):
    assert (event.run, event.name, phase_of(event).value) == (each.run, each.name, each.phase), f"another: {each}"
    assert event.at_s <= each.ended_s, f"from the future: {each}"
    assert each.revision >= latest[each.run], f"from the past: {each}"
    if each.kind != "submit":  # a repeated submission is answered with its own job
        assert each.revision >= latest[each.name], f"from the past: {each}"
    if is_stopped or each.kind == "stop":
        assert RANK[each.phase] >= RANK["stopping"], f"was stopped: {each}"


def check_refusal(each, events, spans, latest):
    """``latest`` is the last event of the name that a client knew of when this was asked."""
    if each.refusal == "UnknownJob":
        assert not latest, f"was there: {each}"
    elif each.refusal == "CallError":  # another job has taken the name
        assert each.kind == "stop" and any(
            event.kind == "submitted" and event.name == each.name and event.number > latest
            and event.at_s <= each.ended_s
            for event in events
        ), f"no other job: {each}"  # fmt: skip
    else:
        assert any(begin <= each.ended_s and each.began_s <= end for begin, end in spans), f"no conflict: {each}"


def spans_of(events):
    """Name to the times in which it had a job that had not ended."""
    begun_at, spans = {}, defaultdict(list)
    for event in events:
        if event.kind == "submitted":
            begun_at[event.run] = event.name, event.at_s
        if phase_of(event).ended:
            name, begun_s = begun_at.pop(event.run)
            spans[name].append((begun_s, event.at_s))
    for name, begun_s in begun_at.values():
        spans[name].append((begun_s, float("inf")))
    return spans


def check_tokens(answers, events):
    """A token has one job, which no other token has; each job has a token that was answered with it."""
    runs = defaultdict(set)
    for each in answers:
        if each.token and each.run:
            runs[each.token].add(each.run)
    assert all(len(own) == 1 for own in runs.values()), "a token has two jobs"
    submitted = [event.run for event in events if event.kind == "submitted"]
    assert sorted(run for own in runs.values() for run in own) == sorted(submitted), "a job has no token, or two"


LOG = [
    (1, "a", "x", "queued"), (2, "a", "x", "running"), (3, "a", "x", "stopping"), (4, "a", "x", "stopped"),
    (5, "a", "y", "queued"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ([(1, "a", "x", "queued"), (2, "a", "y", "queued")], "has two jobs"),
        ([(1, "a", "x", "queued"), (2, "a", "x", "running"), (3, "a", "x", "starting")], "goes back"),
        ([(1, "a", "x", "queued"), (2, "a", "x", "stopping"), (3, "a", "x", "running")], "goes back"),
        ([(1, "a", "x", "queued"), (2, "a", "x", "stopped"), (3, "a", "x", "running")], "has ended"),
        ([(1, "a", "x", "queued"), (2, "a", "x", "stopped"), (3, "a", "x", "queued")], "submitted twice"),
        ([(1, "a", "x", "queued"), (3, "a", "x", "running")], "assert"),
    ],
)
def test_check_events_rejects_a_wrong_log(log, why):
    check_events([event_of(*row) for row in LOG])
    with pytest.raises(AssertionError, match=why):
        check_events([event_of(*row) for row in log])


def answer(kind, began_s, ended_s, run, revision, phase, token=""):
    return Told(0, kind, "a", began_s, ended_s, run, revision, phase, token=token)


def refusal(kind, began_s, ended_s, refusal):
    return Told(0, kind, "a", began_s, ended_s, refusal=refusal)


RIGHT = [
    refusal("get", 0.5, 1.2, "UnknownJob"),
    answer("submit", 0.9, 1.5, "x", 1, "queued", "t1"),
    refusal("submit", 2.0, 2.5, "JobConflict"),
    answer("stop", 2.9, 3.5, "x", 3, "stopping"),
    answer("get", 3.6, 4.2, "x", 3, "stopping"),
    refusal("stop", 4.5, 5.5, "CallError"),
    answer("submit", 4.9, 5.2, "y", 5, "queued", "t2"),
    answer("submit", 6.0, 6.1, "x", 4, "stopped", "t1"),
]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (answer("get", 3.0, 3.1, "x", 2, "queued"), "another"),
        (answer("get", 1.6, 1.9, "x", 2, "running"), "from the future"),
        (answer("get", 4.3, 4.4, "x", 2, "running"), "from the past"),
        (answer("get", 6.0, 6.1, "x", 4, "stopped"), "from the past"),
        (answer("submit", 4.3, 4.4, "x", 2, "running", "t1"), "from the past"),
        (answer("stop", 2.1, 2.2, "x", 2, "running"), "was stopped"),
        (refusal("get", 1.6, 1.7, "UnknownJob"), "was there"),
        (refusal("submit", 4.1, 4.9, "JobConflict"), "no conflict"),
        (refusal("stop", 6.0, 6.1, "CallError"), "no other job"),
        (refusal("submit", 4.5, 5.5, "CallError"), "no other job"),
    ],
)
def test_check_answers_rejects_a_wrong_answer(wrong, why):
    events = [event_of(*row) for row in LOG]
    check_answers(RIGHT, events)
    with pytest.raises(AssertionError, match=why):
        check_answers([*RIGHT, wrong], events)


def test_check_answers_rejects_a_stop_without_effect():
    """Reject an answer although the log agrees with it."""
    events = [event_of(*row) for row in [*LOG[:3], (4, "a", "x", "running")]]
    with pytest.raises(AssertionError, match="was stopped"):
        check_answers([*RIGHT[1:4], answer("get", 4.1, 4.2, "x", 4, "running")], events)


def test_check_tokens_rejects_a_second_job():
    events = [event_of(*row) for row in LOG]
    check_tokens(RIGHT, events)
    with pytest.raises(AssertionError, match="has two jobs"):
        check_tokens([*RIGHT, answer("submit", 7, 8, "y", 5, "queued", "t1")], events)
    for answers in (RIGHT[:6], [*RIGHT, answer("submit", 7, 8, "y", 5, "queued", "t3")]):
        with pytest.raises(AssertionError, match="no token, or two"):
            check_tokens(answers, events)


def event_of(number, name, run, phase="queued"):
    kind = "submitted" if phase == "queued" else phase
    return event_message(JobEvent(number, float(number), name, run, kind, phase=JobPhase(phase)))
