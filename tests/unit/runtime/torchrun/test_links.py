# SPDX-License-Identifier: Apache-2.0
"""Ports and connections over which the processes of a launched job meet, and the ends of such a job."""

import socket
import threading
from contextlib import closing, nullcontext

import pytest

from dlrover.python.rl.common.sockets import HeldPort
from dlrover.python.rl.recipe.launch import describe_job, run_together
from dlrover.python.rl.runtime.torchrun import links
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, accept_all, join
from dlrover.python.rl.trainer.trainer import BaseTrainer, report_nothing
from dlrover.python.rl.trainer.workload import BaseWorkload
from tests.support.commands import wait_for


class Store(dict):
    def set(self, key, value):
        self[key] = value


def test_ranks_meet_despite_a_stray_connection(monkeypatch):
    monkeypatch.setattr(links, "_HELLO_S", 0.05)
    store, meetings = Store(), []
    meeting = threading.Thread(target=lambda: meetings.append(accept_all(LaunchEnv(0, 2), store)), daemon=True)
    meeting.start()
    port = int(wait_for(lambda: store.get(LaunchEnv().store_key))[32:])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stray:
        stray.sendall(b"\0\0\0\x30half")
        link = join(LaunchEnv(1, 2), store)
        meeting.join(30)
    assert list(meetings[0]) == [1]
    link.close()
    meetings[0][1].close()


ROLES = "{trainer: {module: test_links, class: Caller}, workload: {actor: {module: test_links, class: Raiser}}"
ERRORS = {"none": None, "interrupt": KeyboardInterrupt(), "value": ValueError("told to fail")}
OUTCOMES = []


class Raiser(BaseWorkload):
    def act(self):
        error = ERRORS[self.config.error]
        if error is not None:
            raise error


class Caller(BaseTrainer):
    def init(self):
        OUTCOMES.clear()

    def fit(self):
        self.RG_ACTOR.act()

    def on_end(self, outcome):
        OUTCOMES.append(outcome)


def launched(folder, error):
    (folder / "job.yaml").write_text(f"{ROLES}, config: {{error: none}}}}", encoding="utf-8")
    launch = LaunchEnv()
    return run_together(lambda: describe_job("", "job.yaml", [f"error={error}"], launch), launch, report_nothing)


@pytest.mark.parametrize(("error", "outcomes"), [("none", []), ("value", ["failed"]), ("interrupt", ["stopped"])])
def test_launched_trainer_hears_of_its_end(tmp_path, monkeypatch, error, outcomes):
    monkeypatch.chdir(tmp_path)
    # The trainer's thread still waits for the interrupted actor: it shall not log that into another test's output.
    monkeypatch.setattr("dlrover.python.rl.trainer.port.STRAGGLER_LOG_INTERVAL_S", 3600.0)
    with pytest.raises(KeyboardInterrupt) if error == "interrupt" else nullcontext():
        assert (launched(tmp_path, error) is not None) == bool(outcomes)
    assert outcomes == OUTCOMES


HERE = "127.0.0.1"


@pytest.fixture
def port():
    port = HeldPort()
    yield port
    port.give_back()


def bound(port, reuse):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        server.bind((HERE, port))
    except OSError:
        server.close()
        raise
    return closing(server)


def test_held_port_is_only_for_servers_with_reused_addresses(port):
    number = port.take(address=HERE)
    with pytest.raises(OSError, match="in use"):
        bound(number, reuse=False)
    with bound(number, reuse=True) as server:
        server.listen()
        with socket.create_connection((HERE, number), timeout=5):
            pass


def test_held_port_is_free_once_it_is_given_back(port):
    other = HeldPort()
    wanted = port.take(address=HERE)
    assert other.take((wanted,), HERE) not in (wanted, 0)
    port.give_back()
    assert (port.number, other.take((wanted,), HERE)) == (0, wanted)
    other.give_back()
