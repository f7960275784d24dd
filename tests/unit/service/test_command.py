# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl serve``: what it cannot do is one line."""

import asyncio
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from dlrover.python.rl.cli import serve
from dlrover.python.rl.cli.remote import check_submitted, enqueue
from dlrover.python.rl.common.errors import ClusterUnavailable, InvalidJob, JobConflict


def test_a_metrics_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobConflict, match=f"^cannot serve metrics at 127.0.0.1:{port}: Address already in use$"):
            serve._metrics(CollectorRegistry(), "127.0.0.1", port, "", None)
    served = serve._metrics(CollectorRegistry(), "127.0.0.1", 0, "", None)
    served.close()


async def test_the_service_ends_when_its_cluster_is_lost_and_not_when_the_gcs_is_started_again(monkeypatch):
    monkeypatch.setattr(serve, "_LOOK_S", 0.01)
    looks = iter(["", "gcs_server", "", "raylet", "raylet"])

    with pytest.raises(ClusterUnavailable, match="^the raylet of the service's Ray cluster has died: start the ser"):
        async with asyncio.timeout(20):
            await serve._wait_for_the_end(asyncio.Event(), lambda: next(looks))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--root", "root", "--state", "state"], ""),
        (["--root", "root", "--state", "root/state"], "root/state is inside "),
        (["--root", "root", "--state", "link/state"], "link/state is inside "),
        (["--state", "."], "choose another --state or --root"),
    ],
)
def test_serve_paths_are_from_where_it_was_started(tmp_path, monkeypatch, arguments, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).touch()
    served = []

    async def noted(address, state, tls, options):
        served.extend([Path.cwd(), state, *tls[:2], options["metrics_token_file"]])

    monkeypatch.setattr(serve, "_serve", noted)
    files = ["--tls-cert", "tls.crt", "--tls-key", "tls.key", "--metrics-token-file", "metrics"]
    done = CliRunner().invoke(serve.serve, [*arguments, *files])
    assert refused in str(done.exception or "")
    names = [] if refused else ["root", "state", "tls.crt", "tls.key", "metrics"]
    assert served == [tmp_path / name for name in names]


JOB = """
trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer, device_type: CPU, device_per_node: 3}
workload: {actor: {module: of.another, class: Machine}}
config: {model: /of/another/machine, data: {train: /of/it.jsonl}, engine: {lora: {rank: true}}}
"""


def test_a_job_with_wrong_types_is_refused_before_a_service_is_asked(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(JOB)
    overrides = ["steps=x", "workload.actor.num=0", "sead=1"]
    done = CliRunner().invoke(enqueue, [str(tmp_path / "job.yaml"), *overrides, "--server", "127.0.0.1:1"])
    assert [error.where for error in done.exception.errors] == [
        "workload.actor.num",
        "config.steps",
        "config.engine.lora.rank",
        "config.sead",
    ]


def refused(tmp_path, *overrides):
    (tmp_path / "job.yaml").write_text(JOB.replace("true", "4"))
    done = CliRunner().invoke(enqueue, [str(tmp_path / "job.yaml"), *overrides, "--server", "127.0.0.1:1"])
    assert isinstance(done.exception, InvalidJob)
    return [str(error) for error in done.exception.errors]


def test_a_name_among_the_overrides_is_refused_beside_what_else_is_wrong(tmp_path):
    named, typed = refused(tmp_path, "name=second", "steps=true")
    assert (named, typed) == ("name: use the option --name", "config.steps: input should be a valid integer, got True")


def test_options_of_algorithms_engines_and_transports_are_checked_before_a_service_is_asked(tmp_path):
    algorithm = "algorithm={name: grpo, kl_coeff: 1}"
    engine = "engine={train_options: {x: 1}, rollout: torch, rollout_options: {y: 1}, weight_sync_options: {foldr: z}}"
    assert [error.partition(":")[0] for error in refused(tmp_path, algorithm, engine)] == [
        "config.algorithm.kl_coeff",
        "config.engine.train_options.x",
        "config.engine.rollout_options.y",
        "config.engine.weight_sync_options.foldr",
    ]
    extensions = ["algorithm={name: not_here:Mine}", "engine={train: acme, rollout: not.here:E, weight_sync: zebra}"]
    near = ["algorithm={name: my_grpo}", "engine={train: fsdp3, rollout: my_vllm, weight_sync: broadcast_rdma}"]
    for installed_there in (extensions, near):
        check_submitted(JOB.replace("true", "4"), "a-job", installed_there, tmp_path)


def test_what_another_machine_has_is_not_looked_for_here(tmp_path):
    right = JOB.replace("true", "4")
    check_submitted(right, "a-job", ["steps=3"], tmp_path)
    check_submitted(right.replace("dlrover.python.rl.recipe.grpo", "of.another"), "a-job", ["stps=x"], tmp_path)
    (tmp_path / "broken_here.py").write_text("import of_another_machine\n\nclass GRPOTrainer: ...\n")
    check_submitted(right.replace("dlrover.python.rl.recipe.grpo", "broken_here"), "a-job", [], tmp_path)
