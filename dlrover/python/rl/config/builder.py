# SPDX-License-Identifier: Apache-2.0
"""A fluent builder of jobs, with upstream DLRover's methods."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from dlrover.python.rl.common.by_value import name_for
from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.config.layout import job_from_mapping
from dlrover.python.rl.config.plain import from_plain, map_values
from dlrover.python.rl.config.spec import RUNS, JobSpec

B = TypeVar("B", bound="JobBuilder")


class JobBuilder:
    """Builds a job. A call that names a role makes it current: ``total``, ``per_node``, ``env``, ``resource``,
    ``standby`` and ``hang_after`` apply to it. Nothing is checked before :meth:`spec`."""

    def __init__(self) -> None:
        sections = ("trainer", "workload", "env", "restart", "checkpoint", "liveness")
        self._job: dict[str, Any] = {**{name: {} for name in sections}, "workload_group": []}
        self._config: Any = {}
        self._current: dict[str, Any] | None = None

    def node_num(self: B, num: int = 1) -> B:
        self._job["trainer"]["node_number"] = num
        return self

    def device_per_node(self: B, num: int = 8) -> B:
        self._job["trainer"]["device_per_node"] = num
        return self

    def device_type(self: B, device_type: str = "GPU") -> B:
        """``"CPU"`` or ``"GPU"``."""
        self._job["trainer"]["device_type"] = device_type
        return self

    def job_dir(self: B, folder: str | Path, overwrite: bool = False) -> B:
        """The output folder, by default one for each run in ``runs/<name>``; ``overwrite`` replaces results in it."""
        self._job |= {"job_dir": str(folder), "overwrite": overwrite}
        return self

    def config(self: B, config: Mapping[str, Any] | DictConfig) -> B:
        self._config = config
        return self

    def global_env(self: B, env: Mapping[str, str]) -> B:
        """Environment of every process of the job; cumulative."""
        self._job["env"].update(env)
        return self

    def restart_limits(self: B, **limits: Any) -> B:
        """Fields of :class:`~dlrover.python.rl.config.spec.RestartSpec`."""
        self._job["restart"].update(limits)
        return self

    def checkpoint(self: B, **settings: Any) -> B:
        """Fields of :class:`~dlrover.python.rl.config.spec.CheckpointSpec`: ``every=10, keep=2, resume="latest",
        commit_to="job_dir"``."""
        self._job["checkpoint"].update(settings)
        return self

    def liveness(self: B, **settings: Any) -> B:
        """Fields of :class:`~dlrover.python.rl.config.spec.LivenessSpec`: ``beat_s=0.5, lease_s=60``."""
        self._job["liveness"].update(settings)
        return self

    def trainer_hang_after(self: B, seconds: float) -> B:
        """Seconds without progress of the trainer's own code before it is killed and recovered."""
        self._job["trainer"]["hang_after_s"] = seconds
        return self

    def trainer(self: B, module_name: str | type, class_name: str = "") -> B:
        """Name the trainer by module and class, or pass the class, which may be one of the main script."""
        self._job["trainer"].update({"module": module_name, "class": class_name})
        return self

    def role(self: B, name: str, module_name: str | type, class_name: str = "") -> B:
        """Add a role of any name, with its class as in :meth:`trainer`, and make it current."""
        self._current = self._job["workload"].setdefault(name.lower(), {})
        self._current.update({"module": module_name, "class": class_name})
        return self

    def actor(self: B, module_name: str | type, class_name: str = "") -> B:
        """The ACTOR role (required)."""
        return self.role("actor", module_name, class_name)

    def rollout(self: B, module_name: str | type, class_name: str = "") -> B:
        return self.role("rollout", module_name, class_name)

    def reference(self: B, module_name: str | type, class_name: str = "") -> B:
        return self.role("reference", module_name, class_name)

    def reward(self: B, module_name: str | type, class_name: str = "") -> B:
        return self.role("reward", module_name, class_name)

    def critic(self: B, module_name: str | type, class_name: str = "") -> B:
        return self.role("critic", module_name, class_name)

    def total(self: B, num: int = 1) -> B:
        self._role("total")["num"] = num
        return self

    def per_node(self: B, num: int = 1) -> B:
        self._role("per_node")["per_node"] = num
        return self

    def env(self: B, env: Mapping[str, str]) -> B:
        """Environment of the current role; overrides the global one."""
        self._role("env").setdefault("env", {}).update(env)
        return self

    def resource(self: B, **amounts: float) -> B:
        """Resources of one worker of the current role: ``cpu=2, gpu=0.5, memory=4096`` (MB)."""
        self._role("resource").setdefault("resource", {}).update(amounts)
        return self

    def standby(self: B, num: int = 1) -> B:
        """Standby processes, which replace lost workers of the current role."""
        self._role("standby")["standby"] = num
        return self

    def hang_after(self: B, seconds: float) -> B:
        """Seconds without progress before a worker of the current role is killed and recovered."""
        self._role("hang_after")["hang_after_s"] = seconds
        return self

    def enable_ray_auto_visible_device(self: B) -> B:
        """Let Ray choose the visible devices of the current role, which it does not by default."""
        return self.env({"DLROVER_RL_RAY_VISIBLE_DEVICES": "1"})

    def with_collocation(self: B, *roles: str) -> B:
        """Let these roles share devices."""
        specs = {role.lower(): self._job["workload"].get(role.lower(), {}) for role in roles}
        self._job["workload_group"].append(
            {name: int(spec.get("per_node") or spec.get("num", 1)) for name, spec in specs.items()}
        )
        return self

    def with_collocation_all(self: B) -> B:
        """Let all roles defined so far share devices."""
        return self.with_collocation(*self._job["workload"])

    def _role(self, call: str) -> dict[str, Any]:
        if self._current is None:
            raise CallError(f"{call}() applies to a role: call actor(), rollout(), ... or role() first")
        return self._current

    def spec(self, name: str, search_path: tuple[str, ...] = (), in_process: bool = False) -> JobSpec:
        """Return the job under ``name``; unless it runs ``in_process``, classes of the main script are stored for other
        processes. Raises InvalidJob with all errors."""
        inputs = None if in_process else RUNS / name / "inputs"
        roles = {role: _with_names(values, inputs) for role, values in self._job["workload"].items()}
        trainer = _with_names(self._job["trainer"], inputs)
        data = OmegaConf.create({**self._job, "name": name, "trainer": trainer, "workload": roles})
        config = self._config
        data["config"] = _within_job(config) if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        return job_from_mapping(data, name, search_path)


_REFERENCE = re.compile(r"(?<!\\)\$\{(?P<key>[A-Za-z_][\w.]*)\}")


def _within_job(config: DictConfig) -> DictConfig:
    """Rewrite references to keys of ``config``, which it makes from its own root, as references from the job's root."""
    content = OmegaConf.to_container(config, resolve=False)
    plain, absent = from_plain(content), object()  # type: ignore[arg-type]

    def rewrite(match: re.Match[str]) -> str:
        is_own = OmegaConf.select(plain, match["key"], default=absent) is not absent
        return f"${{config.{match['key']}}}" if is_own else match[0]

    return DictConfig(
        map_values(content, lambda _, value: _REFERENCE.sub(rewrite, value) if isinstance(value, str) else value)
    )


def _with_names(values: Mapping[str, Any], inputs: Path | None) -> dict[str, Any]:
    """Return the settings of a role or the trainer with the names of its class."""
    kind = values.get("module")
    if not isinstance(kind, type):
        return dict(values)
    name = name_for(kind, inputs) if inputs is not None else f"{kind.__module__}:{kind.__qualname__}"
    return {**values, **dict(zip(("module", "class"), name.split(":", 1), strict=True))}
