"""With which options the actors of a job are made."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec

VISIBLE_DEVICES_OFF = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}


ON_CPU = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Several processes share the cores: threads that spin while they wait take them from the others."""


def actor_options(name: str, env: Mapping[str, str], placed: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's options of a process of a job.

    Args:
        name: in the system's namespace.
        env: of the process.
        placed: resources and scheduling strategy.
    """
    return {
        "name": name,
        "namespace": NAMESPACE,
        # Without it the process would end with the master that made it.
        "lifetime": "detached",
        # Replacing a process is the master's job: Ray's own restart would hide it, in its constructor's state.
        "max_restarts": 0,
        "runtime_env": {"env_vars": dict(env)},
        **placed,
    }


def process_env(job: JobSpec) -> dict[str, str]:
    """What every process of the job finds in its environment."""
    if job.trainer.device_type != "CPU":
        return dict(job.env)
    return {**ON_CPU, **job.env}


def member_env(job: JobSpec, role: RLRoleType) -> dict[str, str]:
    """What a member of ``role`` finds in its environment."""
    spec = job.workloads[role]
    env = {**process_env(job), **spec.env}
    return env if spec.env.get("DLROVER_RL_RAY_VISIBLE_DEVICES") == "1" else {**VISIBLE_DEVICES_OFF, **env}


def keep_off(nodes: Sequence[str]) -> dict[str, Any]:
    """The option that keeps an actor outside placement groups off ``nodes`` (Ray's node ids)."""
    return {"label_selector": {"ray.io/node-id": f"!in({','.join(nodes)})"}} if nodes else {}
