# SPDX-License-Identifier: Apache-2.0
"""The metrics of a job, against its journal; dashboard and alerts, against the metrics; the endpoint."""

import http.client
import json
import os
import re
import socket
import ssl
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dlrover.python.rl import metrics as package
from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.events import CauseKind, Progressed, Released, Resized, RoleSettings, TrainerFinished
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.process.metrics import (
    MAX_CALL_SERIES,
    MAX_MEMBER_SERIES,
    STEP_METRICS,
    EndedJob,
    JobMetrics,
    MetricsEndpoint,
    ServiceMetrics,
    TimeUse,
    tls_context,
)
from dlrover.python.rl.trainer.trainer import StepReport
from tests.support import control_runs as runs
from tests.support.certificates import write_certificate

FILES = Path(package.__path__[0])

STORY = [runs.TERMS, *runs.OPEN, runs.lost("ROLLOUT", 0), runs.started("ROLLOUT", 0, 2), Progressed(1, 2)]
"""Twelve events, a second apart, with one lost worker."""


def timed(events, every_s=1.0, from_s=1000.0):
    return [(from_s + every_s * at, event) for at, event in enumerate(events)]


def metrics_of(events, now_s=2000.0):
    metrics = JobMetrics("job", "0a1b", lambda: now_s)
    metrics.replay(timed(events))
    return metrics


def exported(metrics):
    """The value of each sample, by its name and its labels without the job's."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "job_name"]
            samples[" ".join([sample.name, *labels])] = sample.value
    return samples


def differences(samples, expected):
    return {name: samples.get(name) for name, value in expected.items() if samples.get(name) != pytest.approx(value)}


def test_samples_follow_the_journal():
    expected = {
        "rl_job_failures_total cause=process_died role=ROLLOUT": 1,
        "rl_job_phase phase=running": 1,
        "rl_job_committed_step": 2,
        "rl_job_members role=ACTOR": 2,
        "rl_job_members_wanted role=ACTOR": 2,
        "rl_job_recovery_seconds_count role=ROLLOUT": 1,
        "rl_job_recovery_seconds_sum role=ROLLOUT": 1.0,
    }
    assert differences(exported(metrics_of(STORY)), expected) == {}
    repeated = metrics_of([*STORY[:-1], runs.lost("ROLLOUT", 0)])  # of the former process
    assert exported(repeated)["rl_job_failures_total cause=process_died role=ROLLOUT"] == 1


def test_events_taken_one_by_one_export_like_a_replay():
    metrics, state = JobMetrics("job", "0a1b", lambda: 2000.0), JobState()
    for at_s, event in timed(STORY):
        before, (state, _) = state, step(state, event, at_s)
        metrics.take(at_s, before, state, event)
    assert exported(metrics) == exported(metrics_of(STORY))


def test_the_shares_of_time_add_up():
    account = metrics_of(STORY).account
    opened = len(runs.OPEN) - 1  # of the events, StepsOpened
    assert account.spent_s(TimeUse.START) == opened
    assert account.seconds[TimeUse.RECOVERY, "process_died"] == 2  # lost, started, progressed
    assert account.spent_s(TimeUse.USEFUL) == 2
    assert sum(account.seconds.values()) == len(STORY) - 1
    assert account.goodput == pytest.approx(2 / (len(STORY) - 1))


def test_time_counts_between_events_until_the_job_ends():
    samples = exported(metrics_of(STORY, now_s=1000.0 + len(STORY) - 1 + 50))
    expected = {
        "rl_job_time_seconds_total cause= use=useful": 52,
        "rl_job_time_seconds_total cause=process_died use=recovery": 2,
    }
    assert differences(samples, expected) == {}
    account = metrics_of([*STORY, TrainerFinished(1), Released(1)]).account
    assert account.over and account.seconds[TimeUse.ENDING, ""] == 1
    account.book(9999.0)
    assert account.seconds[TimeUse.ENDING, ""] == 1


RESIZED = [*STORY, Resized("ROLLOUT", 3)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([*RESIZED, runs.started("ROLLOUT", 2, 1), Progressed(1, 3), Progressed(2, 3)], {"resize": 3, "recovery": 2}),
        ([*STORY, Resized("ROLLOUT", 2), Progressed(1, 3)], {"recovery": 2}),  # it has two
        ([*RESIZED, runs.lost("ROLLOUT", 0, 3), Progressed(2, 3)], {"resize": 1, "recovery": 3}),
        ([*STORY[:-1], Resized("ROLLOUT", 3), Progressed(2, 3)], {"recovery": 3}),  # that has not ended
    ],
)
def test_resize_takes_time_until_the_next_progress(events, expected):
    account = metrics_of([*events, Progressed(2, 4)]).account
    lost_s = {use.value: account.spent_s(use) for use in (TimeUse.RESIZE, TimeUse.RECOVERY)}
    assert {use: seconds for use, seconds in lost_s.items() if seconds} == expected
    assert account.use is TimeUse.USEFUL and sum(account.seconds.values()) == len(events)


def test_restart_of_the_whole_job_is_lost_time():
    metrics = JobMetrics("job", "0a1b", lambda: 2000.0)
    events = [*STORY[:-2], runs.trainer_lost(kind=CauseKind.RETRYABLE_ERROR)]
    metrics.replay([*timed(events), (1100.0, Progressed(1, 1))])
    assert metrics.account.spent_s(TimeUse.RESTART) + metrics.account.spent_s(TimeUse.RECOVERY) > 80


def test_time_is_lost_to_the_first_failure():
    hung = runs.lost("ROLLOUT", 0, kind=CauseKind.HUNG)
    events = [*STORY[:-3], hung, runs.trainer_lost(kind=CauseKind.OUT_OF_MEMORY), Progressed(2, 1)]
    assert {cause for use, cause in metrics_of(events).account.seconds if use is TimeUse.RECOVERY} == {"hung"}
    events = [*STORY[:-3], runs.trainer_lost(kind=CauseKind.USER_ERROR), Released(1)]
    assert metrics_of(events).account.seconds[TimeUse.ENDING, "user_error"] == 1


def test_restarts_are_counted_by_cause():
    samples = exported(metrics_of([runs.TERMS, *runs.up(), runs.lost("ACTOR", 0, kind=CauseKind.NODE_LOST)]))
    restarts = {name: value for name, value in samples.items() if name.startswith("rl_job_restarts_total ")}
    assert restarts["rl_job_restarts_total cause=node_lost"] == sum(restarts.values()) == 1
    assert len(restarts) == len(CauseKind)


def test_member_has_its_state_and_the_age_of_its_beat():
    now_s = [2000.0]
    metrics = JobMetrics("job", "0a1b", lambda: now_s[0])
    metrics.replay(timed(STORY[:-2]))  # ROLLOUT[0] is lost
    metrics.beat(ProcessId("ACTOR", 0), {})
    metrics.beat(ProcessId("ACTOR", 1), {}, 40.0)
    metrics.beat(ProcessId.standby("ACTOR", 7), {})
    metrics.beat(TRAINER_ID, {"ACTOR": 5})
    now_s[0] += 3.0
    samples = exported(metrics)
    expected = {
        "rl_job_member_up rank=0 role=ROLLOUT": 0,
        "rl_job_member_up rank=1 role=ACTOR": 1,
        "rl_job_pending_calls role=ACTOR": 5,
        "rl_job_member_call_seconds rank=0 role=ACTOR": 0,
        "rl_job_member_call_seconds rank=1 role=ACTOR": 43,
    }
    assert differences(samples, expected) == {}
    ages = {name: value for name, value in samples.items() if name.startswith("rl_job_member_heartbeat_age_seconds")}
    assert list(ages.values()) == [3.0] * 2 and all("role=ACTOR" in name for name in ages)


def test_huge_job_makes_a_bounded_number_of_series():
    samples = exported(metrics_of([replace(runs.TERMS, roles={"ROLLOUT": RoleSettings(3 * MAX_MEMBER_SERIES)})]))
    assert sum(name.startswith("rl_job_member_up ") for name in samples) == MAX_MEMBER_SERIES


def test_bytes_and_commits_add_up_over_the_steps():
    metrics = metrics_of(STORY)
    for number, sync_bytes in enumerate([100.0, float("nan"), 50.0], 1):
        values = {"weights/sync_bytes": sync_bytes, "time/commit": 0.2, "sandbox/limits": 2.0}
        metrics.report(StepReport(number, 3, values, commit_bytes=1000))
    expected = {
        "rl_job_moved_bytes_total of=weights": 150,
        "rl_job_moved_bytes_total of=commits": 3000,
        "rl_job_commit_seconds_count": 3,
        "rl_job_commit_seconds_sum": 0.6,
        "rl_job_sandbox_members level=limits": 2,
        "rl_job_sandbox_members level=bubblewrap": 0,
    }
    assert differences(exported(metrics), expected) == {}


def test_steps_and_calls_are_counted():
    metrics = metrics_of(STORY)
    for number in range(1, 4):
        calls = {("ROLLOUT", "generate"): (0.0, 0.0, 0.0, 0.0, 2.0, *(0.0,) * 9, 0.14)}
        values = {"reward/mean": 0.5 + number, "time/step": 0.2, "loss": float("nan"), "memory/peak_gib": 1.5}
        if number == 2:
            values |= {"eval/reward": 0.25, "eval/math/hard/reward": 0.5, "eval/math/hard/failed": 1.0}
        metrics.report(StepReport(number, 10, values, calls, {"ROLLOUT": number, "UNKNOWN": 9}))
    expected = {
        "rl_job_pending_calls role=ROLLOUT": 3,
        "rl_job_pending_calls role=ACTOR": 0,
        "rl_job_step": 3,
        "rl_job_total_steps": 10,
        "rl_job_reward": 3.5,
        "rl_job_evaluation_reward set=": 0.25,  # of the last evaluation
        "rl_job_evaluation_reward set=math/hard": 0.5,
        "rl_job_device_memory_gib": 1.5,
        "rl_job_step_seconds_count": 2,
        "rl_job_call_seconds_count method=generate role=ROLLOUT": 6,
        "rl_job_call_seconds_sum method=generate role=ROLLOUT": 0.42,
        "rl_job_call_seconds_bucket le=0.03 method=generate role=ROLLOUT": 0,
        "rl_job_call_seconds_bucket le=0.1 method=generate role=ROLLOUT": 6,
    }
    samples = exported(metrics)
    assert differences(samples, expected) == {}
    assert not {"rl_job_pending_calls role=UNKNOWN", "rl_job_loss"} & samples.keys()


def test_new_method_names_make_a_bounded_number_of_series():
    metrics = metrics_of(STORY)
    for number in range(2 * MAX_CALL_SERIES):
        metrics.report(StepReport(number, 0, {}, {("ACTOR", f"method_{number}"): (1.0, *(0.0,) * 13, 0.1)}))
    samples = exported(metrics)
    counts = [value for name, value in samples.items() if name.startswith("rl_job_call_seconds_count ")]
    assert len(counts) == MAX_CALL_SERIES + 1 and sum(counts) == 2 * MAX_CALL_SERIES


def test_service_counts_ended_jobs_and_dates_the_last_ones():
    jobs = [EndedJob("toy", owner, "failed", "hung", at_s) for owner, at_s in (("alice", 10.0), ("bob", 4000.0))]
    jobs += [EndedJob("toy", "alice", "failed", "hung", 4500.0), EndedJob("other", "bob", "finished", "", 4600.0)]
    samples = exported(ServiceMetrics(lambda: ({}, 0, 0), lambda: jobs, lambda: 5000.0))
    ended = {name: value for name, value in samples.items() if name.startswith("rl_service_job")}
    total, dated = "rl_service_jobs_ended_total", "rl_service_job_ended_timestamp_seconds"
    assert ended == {
        f"{total} cause=hung owner=alice phase=failed": 2.0,
        f"{total} cause=hung owner=bob phase=failed": 1.0,
        f"{total} cause= owner=bob phase=finished": 1.0,
        f"{dated} cause=hung owner=alice phase=failed": 4500.0,
        f"{dated} cause=hung owner=bob phase=failed": 4000.0,
        f"{dated} cause= owner=bob phase=finished": 4600.0,
    }


# -- dashboard and alerts ---------------------------------------------------------------------------------------------


def everything():
    """Names of all metrics, and the labels of each, as a busy job and service export them."""
    job = metrics_of(STORY)
    values = {source: 1.0 for sources in (*STEP_METRICS.values(), ["eval/reward"]) for source in sources[:1]}
    job.beat(ProcessId("ACTOR", 0), {})
    for number in (1, 2):
        job.report(StepReport(number, 9, values, {("ACTOR", "train"): (1.0, *(0.0,) * 13, 0.1)}))
    failed = EndedJob("toy", "alice", "failed", "user_error", 5.0)
    service = ServiceMetrics(lambda: ({"queued": 1}, 2, 3), lambda: [failed], lambda: 6.0)
    service.count("Get", "OK")
    service.time("Get", 0.1)
    discovered = {"job", "instance", "job_name", "owner"}
    labels = {"up": discovered}  # Prometheus's own
    for registry in (job.registry, service.registry):
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                more = discovered if registry is job.registry else set()
                labels.setdefault(sample.name, set()).update(sample.labels, more)
    return labels


def expressions():
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def test_legends_of_the_dashboard_name_the_job():
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            is_of_jobs = panel["type"] == "timeseries" and "rl_job_" in target["expr"]
            assert "{{job_name}}" in target["legendFormat"] or not is_of_jobs, panel["title"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda it: it if " " not in it else None)
def test_dashboard_and_alerts_read_exported_metrics(where, expression):
    labels = everything()
    names = re.findall(r"\b(?:rl_[a-z_]+|up)\b", expression)
    assert names, where
    assert set(names) <= labels.keys(), where
    for name, selectors in re.findall(r"\b(rl_[a-z_]+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*=~?", selectors)) <= labels[name], where
    for _, grouped in re.findall(r"\b(by|on) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", grouped)) <= set.union(*(labels[name] for name in names)), where


# -- the endpoint -----------------------------------------------------------------------------------------------------


TOKEN = "a-token-of-some-length"


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("rl_answer", "For the test.", registry=registry).set(42)
    return registry


@pytest.fixture
def serve(registry):
    opened = []

    def serve(host="127.0.0.1", token="", tls=None, targets=None):
        opened.append(MetricsEndpoint(registry, (host, 0), token, tls, targets))
        return opened[-1].address.replace("0.0.0.0", "127.0.0.1")

    yield serve
    for endpoint in opened:
        endpoint.close()


def ask(address, method="GET", path="/metrics", trusted=None, **headers):
    """``trusted``: the certificates with which it is asked over HTTPS."""
    if trusted is None:
        connection = http.client.HTTPConnection(address, timeout=10)
    else:
        context = ssl.create_default_context(cafile=trusted)
        connection = http.client.HTTPSConnection(address, timeout=10, context=context)
    with closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_endpoint_of_the_service_lists_those_of_its_jobs(serve):
    address = serve(targets=lambda: [{"targets": ["host:1"], "labels": {"owner": "alice"}}])
    status, body = ask(address, path="/sd")
    assert (status, json.loads(body)) == (200, [{"targets": ["host:1"], "labels": {"owner": "alice"}}])
    assert ask(serve(), path="/sd")[0] == 404, "a job's endpoint has none"


REQUESTS = [
    ("GET", "/metrics", {}, 200),
    *((method, "/metrics", {}, 405) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")),
    *(("GET", path, {}, 404) for path in ("/", "/metrics/../secret", "/debug", "/metrics?x=1")),
    *(("GET", "/metrics", {name: value}, 403) for name, value in (("Host", "evil.example:80"), ("Host", ""))),
    ("GET", "/metrics", {"Origin": "http://evil.example"}, 403),
]


@pytest.mark.parametrize(("method", "path", "headers", "expected"), REQUESTS, ids=str)
def test_endpoint_serves_metrics_to_no_other_request(serve, method, path, headers, expected):
    status, body = ask(serve(), method, path, **headers)
    assert (status, "rl_answer 42.0" in body) == (expected, expected == 200)


def test_endpoint_with_a_token_refuses_others(serve):
    address = serve(token=TOKEN)
    assert ask(address)[0] == ask(address, Authorization="Bearer wrong")[0] == 401
    assert ask(address, Authorization=TOKEN)[0] == ask(address, Authorization="Bearer \xff")[0] == 401
    assert ask(address, Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return write_certificate(tmp_path_factory.mktemp("tls"), "own")


def test_beyond_loopback_a_token_and_tls_are_needed(serve, registry, certificate):
    tls = tls_context(*certificate)
    for token, context in (("", None), ("", tls), (TOKEN, None)):
        with pytest.raises(CallError, match=r"beyond loopback.*metrics_tls_cert.*proxy"):
            MetricsEndpoint(registry, ("0.0.0.0", 0), token, context)
    address = serve("0.0.0.0", TOKEN, tls)
    assert ask(address, trusted=certificate[0], Host="cluster.example")[0] == 401
    headers = {"Host": "cluster.example", "Authorization": f"Bearer {TOKEN}"}
    assert ask(address, trusted=certificate[0], **headers)[0] == 200


def test_with_tls_a_token_does_not_travel_in_the_clear(serve, certificate):
    address = serve(token=TOKEN, tls=tls_context(*certificate))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(address, Authorization=f"Bearer {TOKEN}")
    assert ask(address, trusted=certificate[0], Authorization=f"Bearer {TOKEN}")[0] == 200


def test_unfinished_handshake_does_not_delay_others(serve, certificate):
    address = serve(tls=tls_context(*certificate))
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10):
        assert ask(address, trusted=certificate[0])[0] == 200


def test_clients_need_a_certificate_where_a_ca_for_them_is_given(serve, certificate):
    address = serve(tls=tls_context(*certificate, certificate[0]))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(address, trusted=certificate[0])


@pytest.mark.slow
def test_silent_clients_do_not_fill_the_endpoint(serve):
    """Twenty at once are answered; more are cut off, and none of them takes memory or threads."""
    address = serve()
    host, port = address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(60)]
    try:
        assert len(os.listdir("/proc/self/task")) < 60
    finally:
        for connection in silent:
            connection.close()
    for _ in range(100):
        try:
            assert ask(address)[0] == 200
            return
        except (ConnectionError, http.client.HTTPException):
            continue
    raise AssertionError("it does not recover")
