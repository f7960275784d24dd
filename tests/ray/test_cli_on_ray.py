# SPDX-License-Identifier: Apache-2.0
"""The command line on a Ray cluster that it starts itself, and on one that is there."""

import json
import os
import signal
import time

import pytest
import ray

from tests.support.commands import Desk, is_alive, process_table, processes_below, wait_for
from tests.support.manual_clock import within
from tests.support.toy_job import expected_totals, toy_text

pytestmark = pytest.mark.ray

ENDLESS = {"steps": 10**6, "step_s": 0.1}


def address_of_session():
    return ray.get_runtime_context().gcs_address


@pytest.fixture
def desk(tmp_path):
    with Desk(tmp_path) as desk:
        yield desk


@pytest.fixture
def desk_on_ray(desk, ray_session):
    desk.address = address_of_session()
    return desk


def start(desk, name, *overrides, **config):
    """Run the toy job, and return once its first step is reported."""
    (desk.folder / "toy.yaml").write_text(toy_text(desk.folder, {"actor": 2}, **{**ENDLESS, **config}))
    command = desk.start("run", "toy.yaml", f"name={name}", *overrides)
    wait_for(lambda: command.has_said(f"{name}  step 1"))
    return command


def master_of(job):
    return ray.get_actor(f"{job}/master", namespace="dlrover-rl")


def kill_master(job):
    os.kill(ray.get(master_of(job).__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)


def status_of(job):
    return ray.get(master_of(job).status.remote(), timeout=60)


def actors_of(job):
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith(f"{job}/")]


def below(command):
    return set(processes_below(command.pid))


MOMENTS = {
    "checking": lambda command: any("inspection" in line for line in processes_below(command.pid).values()),
    "starting Ray": lambda command: any("gcs_server" in line for line in processes_below(command.pid).values()),
    "placed": lambda command: command.has_said("toy is placed"),
    "running": lambda command: command.has_said("toy  step 1"),
}


SIGNALS = [(moment, signal.SIGINT) for moment in MOMENTS] + [("running", signal.SIGTERM)]


@pytest.mark.parametrize(
    ("moment", "number"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != "checking")) for case in SIGNALS],
)
def test_run_interrupted_at_any_moment_leaves_no_process(desk, moment, number):
    (desk.folder / "toy.yaml").write_text(toy_text(desk.folder, {"actor": 2}, **ENDLESS))
    command = desk.start("run", "toy.yaml")
    wait_for(lambda: MOMENTS[moment](command))
    assert command.poll() is None, command.said()
    started = below(command)
    assert started
    (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
    # Gathered until the end: a child of a command that has ended has lost its parent.
    wait_for(lambda: started.update(below(command)) or command.poll() is not None, 60)
    assert "dlrover-rl resume" in command.end(130 if number == signal.SIGINT else 143) or moment != "running"
    wait_for(lambda: not any(map(is_alive, started)), 20)
    assert not [
        line for line in process_table().values() if str(desk.folder) in line or "dlrover-rl" in line and "toy" in line
    ]


@pytest.mark.slow
def test_second_ctrl_c_ends_the_command_and_the_job_stops(desk_on_ray):
    command = start(desk_on_ray, "twice", faults=["ACTOR-0:update:2:hold"])
    command.interrupt()
    time.sleep(0.2)  # two presses of a key, not one
    command.interrupt()
    command.end(130, 60)
    wait_for(lambda: not [name for name in actors_of("twice") if name != "twice/master"], 30)
    stop = desk_on_ray.start("stop", "twice")
    stop.wait(60)
    assert stop.returncode == (2 if "no job named" in stop.said() else 0), stop.said()
    assert not actors_of("twice")


@pytest.mark.slow
@pytest.mark.parametrize("has_restarts", [True, False], ids=["killed for good", "without restarts"])
def test_run_whose_master_is_gone_leaves_no_actor(desk_on_ray, has_restarts):
    name = f"gone-{has_restarts}".lower()
    command = start(desk_on_ray, name, *([] if has_restarts else ["+master.max_restart=0"]))
    if has_restarts:
        ray.kill(master_of(name))
    else:
        kill_master(name)
    assert "the master is gone" in command.end(5, 60)
    wait_for(lambda: not actors_of(name), 20)


def test_stop_waits_for_the_end_and_removes_the_master(desk_on_ray):
    command = start(desk_on_ray, "stopped")
    assert "stopped: running, step" in desk_on_ray.run("status", "stopped")
    output = desk_on_ray.run("stop", "stopped")
    assert "stopped: stopped" in output or "stopped: ended" in output
    command.end(3, 60)
    assert not actors_of("stopped")


@pytest.mark.slow
def test_submit_takes_the_options_of_the_original(desk_on_ray):
    options = {
        "job_name": "by-options", "rl_config": toy_text(desk_on_ray.folder, {"actor": 2}, steps=3),
        "job_max_restart": 1, "trainer_max_restart": 1, "workload_max_restart": "{'actor': 1}",
        "scheduling_strategy_type": "simple", "master_cpu": 1, "master_mem": 64,
    }  # fmt: skip
    output = desk_on_ray.run("submit", *(word for name, value in options.items() for word in (f"--{name}", str(value))))
    assert "step 3/3" in output and "by-options: finished" in output


@pytest.mark.parametrize("command", ["run", "status", "list"])
def test_command_without_a_cluster_has_an_exit_code_and_one_line(desk, command):
    """The address that Ray leaves of a killed cluster is not tried for minutes."""
    (desk.folder / "toy.yaml").write_text(toy_text(desk.folder))
    arguments = {"run": ["toy.yaml", "--address", "127.0.0.1:1"], "status": ["nothing"], "list": []}[command]
    output = desk.run(command, *arguments, code=4, within_s=60, RAY_ADDRESS="127.0.0.1:1")
    assert "no Ray cluster at 127.0.0.1:1" in output
    assert command == "run" or len(output.strip().splitlines()) == 1


@pytest.mark.slow
def test_detached_job_is_listed_followed_left_and_stopped(desk_on_ray):
    desk = desk_on_ray
    desk.detach("alone", toy_text(desk.folder, **ENDLESS))
    assert "alone" in desk.run("list")
    view = desk.status("alone")
    assert view["phase"] == "running" and view["nodes"] == 1 and view["reward"] > 0 and view["step_s"] > 0.05
    attached = desk.start("attach", "alone")
    wait_for(lambda: attached.has_said("step"))
    attached.interrupt()
    output = attached.end(0, 30)
    assert "step" in output and "alone" in output.splitlines()[-1]
    with within(30):
        desk.run("wait", "alone", "--timeout", "1", code=124)
    explained = desk.run("explain", "alone")
    assert "It is running since" in explained and "starting" not in explained
    assert "did you mean 'alone'" in desk.run("status", "alnoe", code=2)
    assert "../abc" in desk.run("status", "../abc", code=2)
    desk.run("stop", "alone")
    assert not actors_of("alone") and desk.status("alone")["phase"] == "stopped"


@pytest.mark.slow
def test_master_of_an_ended_job_releases_its_resources(desk_on_ray):
    (desk_on_ray.folder / "brief.yaml").write_text(toy_text(desk_on_ray.folder, steps=3))
    desk_on_ray.run("run", "brief.yaml", "--detach")
    desk_on_ray.run("wait", "brief")
    assert desk_on_ray.status("brief")["phase"] == "finished"
    wait_for(lambda: not actors_of("brief"), 90)
    view = desk_on_ray.status("brief")  # from its folder
    assert view["phase"] == "finished" and view["ended"]
    assert "finished" in desk_on_ray.run("explain", "brief")


@pytest.mark.slow
def test_log_and_failure_of_a_killed_worker_are_shown(desk_on_ray):
    desk = desk_on_ray
    limits = {"workload_max_restart": {"actor": 0}}
    desk.detach("failing", toy_text(desk.folder, restart=limits, **ENDLESS))
    (pid,) = [row["pid"] for row in desk.status("failing")["members"] if row["process"] == "ACTOR[0]"]
    os.kill(pid, signal.SIGKILL)
    desk.run("wait", "failing", code=1)
    explained = desk.run("explain", "failing")
    assert "ACTOR[0]" in explained and "died" in explained and "dlrover-rl resume" in explained
    assert "ACTOR[0] attempt 1" in desk.run("logs", "failing", "actor-0")
    assert "did you mean 'actor-0'" in desk.run("logs", "failing", "acter-0", code=2)
    desk.run("stop", "failing")


@pytest.mark.slow
def test_doctor_looks_at_every_node(desk_on_ray):
    output = desk_on_ray.run("doctor", "--folder", str(desk_on_ray.folder / "runs"))
    assert "1 of 1 answer" in output and "clocks: 0." in output
    assert "nothing beyond loopback answers without a token" in output
    assert "nothing to fix" in output


def start_resizable(desk, name, steps):
    roles = {"actor": 1, "rollout": 2, "reward": 1}
    desk.detach(name, toy_text(desk.folder, roles, rollout="Sampler", devices=4, steps=steps, step_s=0.1))


def resize(desk, name, num):
    desk.run("resize", name, "rollout", str(num))
    status = status_of(name)
    assert status.roles["ROLLOUT"] == num
    wait_for(lambda: status_of(name).step > status.step + 2, 60)


def sizes_of(folder, steps):
    """Return the sizes that the role had, in their order; each step was done once, by all workers of its size."""
    result = json.loads((folder / "result.json").read_text())
    assert result["totals"] == expected_totals(steps)
    sizes = result["sizes"]
    assert len(sizes) == steps
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]


@pytest.mark.slow
def test_resize_to_an_impossible_size_is_refused(desk_on_ray):
    start_resizable(desk_on_ray, "steady", 10**5)
    hints = {"actor 2": "its workers hold a state", "rolout 3": "did you mean 'ROLLOUT'?"}
    hints |= {"rollout 0": "0 is not in the range", "rollout 500": "stays as it is"}
    for arguments, words in hints.items():
        assert words in desk_on_ray.run("resize", "steady", *arguments.split(), code=2)
    assert status_of("steady").roles["ROLLOUT"] == 2
    free = ray.available_resources().get("CPU")
    for num in (3, 1, 3):
        resize(desk_on_ray, "steady", num)
    assert ray.available_resources().get("CPU") == free - 1  # the place that was reserved is used again
    desk_on_ray.run("stop", "steady")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_resized_role_keeps_its_size_when_processes_die(desk_on_ray):
    start_resizable(desk_on_ray, "hurt", 400)
    resize(desk_on_ray, "hurt", 4)
    kill_master("hurt")
    wait_for(lambda: status_of("hurt").masters == 2, 60)
    view = desk_on_ray.run("status", "hurt")
    assert "hurt: running, step" in view and "restarts 0" in view
    resize(desk_on_ray, "hurt", 2)
    for process, _, pid, _ in status_of("hurt").members:
        if process in ("ROLLOUT[1]", "trainer"):
            os.kill(pid, signal.SIGKILL)
    desk_on_ray.run("wait", "hurt", "--timeout", "150", within_s=200)
    assert sizes_of(desk_on_ray.folder, 400) == [2, 4, 2]
