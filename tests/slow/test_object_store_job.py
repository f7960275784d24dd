# SPDX-License-Identifier: Apache-2.0
"""A job whose ``job_dir`` is a bucket of S3, as moto serves it: killed, and gone on with on another machine."""

import json
import re
import subprocess
import sys

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.commands import Desk, answers, wait_for
from tests.support.processes import free_port
from tests.support.run_files import write_rows

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto")

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
    port = free_port()
    code = f"from moto.server import main; main(['--host', '127.0.0.1', '--port', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(f"127.0.0.1:{port}") or process.poll() is not None, 60)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def machine(folder, server):
    """Return a machine with its own folder and memory; only the bucket is shared."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    memory = folder / "memory"
    memory.mkdir(parents=True)
    write_tiny_model(folder / "model", hidden=32, layers=1)
    write_rows(folder / "rows.jsonl", [{"prompt": f"{row}+1=", "response": str(row + 1)} for row in range(40)])
    (folder / "job.yaml").write_text(JOB)
    return Desk(folder, AWS_ENDPOINT_URL=server, DLROVER_RL_MEMORY=str(memory), OMP_NUM_THREADS="1", **keys)


@pytest.fixture
def bucket(server):
    keys = dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "testing")
    client = boto3.client("s3", endpoint_url=server, region_name="us-east-1", **keys)
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
    first, second, third = (machine(tmp_path / name, server) for name in ("first", "second", "third"))
    first.run("run", "job.yaml", "--local", "job_dir=s3://runs/whole", within_s=300)
    assert {"whole/job.yaml", "whole/metrics.jsonl", "whole/summary.json"} <= names(bucket, "whole/")

    def newest_copy():
        return max(map(int, re.findall(r"/step-(\d+)", " ".join(names(bucket, "killed/checkpoints")))), default=0)

    command = second.start("run", "job.yaml", "--local", "steps=60", "job_dir=s3://runs/killed")
    wait_for(lambda: newest_copy() >= 20 or command.poll() is not None, 200)
    assert command.poll() is None, command.said()
    command.kill()
    command.wait(20)

    assert "continuing run" in third.run("resume", "s3://runs/killed", "--local", within_s=300)
    assert metrics(bucket, "killed") == metrics(bucket, "whole")
    weights = [content(bucket, f"{run}/model/model.safetensors") for run in ("killed", "whole")]
    assert weights[0] == weights[1]


REFUSED = [
    ("run job.yaml --local job_dir=s3://none-of-mine/run", "job_dir: s3://none-of-mine/run cannot be written"),
    ("resume s3://none-of-mine/run", "s3://none-of-mine/run: is not a readable run"),
    ("check job.yaml job_dir=s4://runs/x", "job_dir: s4://runs/x: Protocol not known: s4"),
    ("check job.yaml job_dir=s3://runs/x checkpoint.commit_to=job_dir", "'job_dir', but s3://runs/x is no folder"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_bucket_without_access_is_refused_before_the_start(server, tmp_path, command, message):
    assert message in machine(tmp_path / "one", server).run(*command.split(), code=2)
