# SPDX-License-Identifier: Apache-2.0
"""A cluster of our own: what it survives, and what it leaves behind."""

import stat
import textwrap

import pytest

from dlrover.python.rl.runtime.ray.cluster.cluster import has_durable_gcs, private_folder
from tests.support.commands import ROOT, run_python

pytestmark = pytest.mark.ray


def in_own_process(code):
    """Run ``code`` in another interpreter, since this one uses the session's cluster. Return its output lines."""
    return run_python(ROOT, "-c", textwrap.dedent(code), within_s=120).stdout.split("\n")


@pytest.mark.slow
def test_master_is_beside_the_head_each_time_it_starts():
    """Masters that took any node would be there four times in a row once in eighty-one."""
    code = """
    import os, signal, sys, time
    import ray
    from tests.ray.two_nodes import two_nodes
    from dlrover.python.rl.runtime.ray.processes.actors import launch

    class Master:
        def where(self):
            return os.getpid(), ray.get_runtime_context().get_node_id()

    with two_nodes(workers=2, cpus=1) as nodes:
        master = launch(Master, "job/master", (), {}, max_restarts=-1)
        for _ in range(4):
            pid, node = ray.get(master.where.remote(), timeout=60)
            print("node", [nodes.node_id(index) for index in range(3)].index(node))
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
    """
    assert [line for line in in_own_process(code) if line.startswith("node")] == ["node 0"] * 4


@pytest.mark.skipif(not has_durable_gcs(), reason="this Ray's GCS keeps its tables in memory only")
@pytest.mark.slow
def test_cluster_survives_its_gcs_and_leaves_nothing():
    code = """
    import os, signal, time, threading
    from pathlib import Path
    import ray
    from ray._private import worker
    from ray.experimental import internal_kv
    from ray.util.placement_group import placement_group
    from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster

    @ray.remote(num_cpus=0)
    class Counter:
        def __init__(self):
            self.calls = 0
        def add(self):
            self.calls += 1
            return self.calls

    before, threads = dict(os.environ), threading.active_count()
    for number in range(2):
        with ray_cluster(None, {"cpu": 2.0}, log_to_driver=False):
            node = worker._global_node
            folder = Path(node.get_session_dir_path())
            counter = Counter.options(name="c", lifetime="detached").remote()
            assert ray.get(counter.add.remote(), timeout=60) == 1
            ray.get(placement_group([{"CPU": 1}], name="p", lifetime="detached").ready(), timeout=60)
            internal_kv._internal_kv_put(b"k", b"v")
            gcs, address = node.all_processes["gcs_server"][0].process, node.gcs_address
            os.kill(gcs.pid, signal.SIGKILL)
            gcs.wait(timeout=10)
            killed_s = time.monotonic()
            assert ray.get(counter.add.remote(), timeout=10) == 2
            call_s = time.monotonic() - killed_s
            found = ray.get_actor("c")
            found_s = time.monotonic() - killed_s
            assert ray.get(found.add.remote(), timeout=10) == 3
            assert node.gcs_address == address
            assert internal_kv._internal_kv_get(b"k") == b"v"
            (group,) = ray.util.placement_group_table().values()
            assert (group["name"], group["state"]) == ("p", "CREATED")
            again = Counter.options(name="d").remote()
            assert ray.get(again.add.remote(), timeout=60) == 1
            print("measured", call_s, found_s, time.monotonic() - killed_s)
        assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
        assert not folder.exists() and not folder.parents[1].exists(), folder
        assert not [t for t in threading.enumerate() if t.name == "gcs-keeper"]
    """
    lines = [line.split()[1:] for line in in_own_process(code) if line.startswith("measured")]
    for call_s, found_s, new_s in (map(float, line) for line in lines):
        assert call_s < 0.5
        assert found_s < 5.0
        assert new_s < 15.0
    assert len(lines) == 2


def test_private_folder_is_private_and_removed_with_its_owner():
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "deep").mkdir()
        (folder / "deep/file").write_text("x")
    assert not folder.exists()


@pytest.mark.slow
def test_killed_and_stopped_nodes_are_noticed_and_end():
    code = """
    import asyncio, sys, threading, time
    from tests.ray.two_nodes import two_nodes
    from dlrover.python.rl.runtime.ray.cluster.nodes import NodeWatch

    with two_nodes(workers=2, cpus=1) as nodes:
        lost, news = {}, threading.Condition()

        def note(loss):
            with news:
                assert loss.node not in lost
                lost[loss.node] = (time.monotonic(), loss.cause.message)
                news.notify_all()

        def loss_of(node_id):
            with news:
                assert news.wait_for(lambda: node_id in lost, timeout=30)
            return lost[node_id]

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        watching = asyncio.run_coroutine_threadsafe(NodeWatch().watch(note), loop)
        third = nodes.add_node()
        for index, act in ((1, nodes.kill_raylet), (2, nodes.stop_raylet), (third, nodes.kill_node)):
            began_s = act(index)
            found_s, why = loss_of(nodes.node_id(index))
            print("measured", found_s - began_s, why)
        nodes.continue_raylet(2)
        nodes.nodes[2].all_processes["raylet"][0].process.wait(timeout=60)
        assert len(lost) == 3, lost
        watching.cancel()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
    """
    lines = [line for line in in_own_process(code) if line.startswith("measured")]
    killed_s, stopped_s, power_s = (float(line.split()[1]) for line in lines)
    assert killed_s < 2.0
    assert "no longer listens" in lines[0]
    assert stopped_s < 5.0
    assert "heartbeats" in lines[1]
    assert power_s < 2.0
