# SPDX-License-Identifier: Apache-2.0
"""A job whose ``job_dir`` is a bucket of S3, as moto serves it: killed, and gone on with on another machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto")

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]
JOB = """
name: stored
trainer: {module: dlrover.python.rl.recipe.sft, class: SFTTrainer, device_type: CPU, device_per_node: 1}
workload: {actor: {module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}}
config: {model: model, data: {train: rows.jsonl}, steps: 60, batch_size: 4, optimizer: {lr: 1e-3}}
checkpoint: {every: 5}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server():
    """The address of a server of S3 on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['--host', '127.0.0.1', '--port', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not listens(port):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Machine:
    """A machine with its own folder and memory; only the bucket is shared."""

    def __init__(self, folder, server):
        self.folder = folder
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
        self.env = {**os.environ, **keys, "AWS_ENDPOINT_URL": server, "OMP_NUM_THREADS": "1"}
        self.env |= {
            "DLROVER_RL_MEMORY": str(folder / "memory"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        (folder / "memory").mkdir(parents=True)
        write_tiny_model(folder / "model", hidden=32, layers=1)
        rows = [{"prompt": f"{row}+1=", "response": str(row + 1)} for row in range(40)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "job.yaml").write_text(JOB)

    def start(self, *arguments):
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen([*CLI, *arguments], cwd=self.folder, env=self.env, stdout=log, stderr=log)

    def run(self, *arguments):
        process = self.start(*arguments)
        code = process.wait(timeout=300)
        return code, (self.folder / "output.log").read_text()


@pytest.fixture
def bucket(server):
    client = boto3.client(
        "s3",
        endpoint_url=server,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",  # noqa: S106 -- moto takes anything
    )
    client.create_bucket(Bucket="runs")
    return client


def names(bucket, prefix):
    objects = bucket.list_objects_v2(Bucket="runs", Prefix=prefix)
    return {item["Key"] for item in objects.get("Contents", [])}


def content(bucket, name):
    return bucket.get_object(Bucket="runs", Key=name)["Body"].read()


def metrics(bucket, run):
    lines = content(bucket, f"{run}/metrics.jsonl").decode().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "speed/"))} for line in lines]


def test_killed_run_resumes_on_another_machine(server, bucket, tmp_path):
    first, second, third = (Machine(tmp_path / name, server) for name in ("first", "second", "third"))
    code, output = first.run("run", "job.yaml", "--local", "job_dir=s3://runs/whole")
    assert code == 0, output
    assert {"whole/job.yaml", "whole/metrics.jsonl", "whole/summary.json"} <= names(bucket, "whole/")

    process = second.start("run", "job.yaml", "--local", "steps=60", "job_dir=s3://runs/killed")
    deadline_s = time.monotonic() + 200
    while max(map(int, re.findall(r"/step-(\d+)", " ".join(names(bucket, "killed/checkpoints")))), default=0) < 20:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()

    code, output = third.run("resume", "s3://runs/killed", "--local")
    assert code == 0, output
    assert "continuing run" in output
    assert metrics(bucket, "killed") == metrics(bucket, "whole")
    weights = [content(bucket, f"{run}/model/model.safetensors") for run in ("killed", "whole")]
    assert weights[0] == weights[1]


def test_bucket_without_access_is_refused_before_the_start(server, tmp_path):
    machine = Machine(tmp_path / "one", server)
    code, output = machine.run("run", "job.yaml", "--local", "job_dir=s3://none-of-mine/run")
    assert code == 2 and "job_dir: s3://none-of-mine/run cannot be written" in output, output
    code, output = machine.run("resume", "s3://none-of-mine/run")
    assert code == 2 and "s3://none-of-mine/run: is not a readable run" in output, output
    code, output = machine.run("check", "job.yaml", "job_dir=s4://runs/x")
    assert code == 2 and "job_dir: s4://runs/x: Protocol not known: s4" in output, output
    code, output = machine.run("check", "job.yaml", "job_dir=s3://runs/x", "checkpoint.commit_to=job_dir")
    assert code == 2 and "checkpoint.commit_to: 'job_dir', but s3://runs/x is no folder" in output, output
