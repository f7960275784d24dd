# SPDX-License-Identifier: Apache-2.0
"""``TrainerPlan``: the checks of a job by its trainer's class before anything starts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType

T = TypeVar("T")


class TrainerPlan:
    """Checks, completes and describes jobs of the class ``trainer``, before there is an object of it.

    A trainer names its plan: ``plan = MyPlan``. This default calls the class methods of the same names that the trainer
    defines, all of which are optional; a plan that extends it adds to their answers."""

    def __init__(self, trainer: type[Any]) -> None:
        self.trainer = trainer

    def check_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        """Validate the job's ``config`` and role sizes."""
        return call_hook(self.trainer, "check_config", (), config, roles)

    def check_options(self, config: Any) -> Iterable[ConfigError]:
        """Find the errors of :meth:`check_config` that a job has on any machine, apart from errors of its schema."""
        return call_hook(self.trainer, "check_options", (), config)

    def check_workloads(self, workloads: Mapping[RLRoleType, type[Any]]) -> Iterable[ConfigError]:
        """Validate the classes of the roles."""
        return call_hook(self.trainer, "check_workloads", (), workloads)

    def complete_config(self, config: Any, devices: str) -> Mapping[str, Any] | None:
        """Return the job's config with the default of every key that it lacks, None if it has no schema. ``devices`` is
        the job's ``device_type``, or ``HERE`` for the devices of this process. Raises InvalidJob."""
        return call_hook(self.trainer, "complete_config", None, config, devices)

    def settings_of_state(self, config: Any) -> Mapping[str, Any]:
        """Return the settings that the trainer's saved state depends on, by their keys in ``config``. A job cannot
        continue from a state with other settings; mappings are compared key by key, a
        :class:`~dlrover.python.rl.trainer.workload.Setting` by its ``kind``."""
        return call_hook(self.trainer, "settings_of_state", {}, config)

    def describe_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[str]:
        """Return lines about a valid config, for ``check`` and the beginning of a run."""
        return call_hook(self.trainer, "describe_config", (), config, roles)


def plan_of(trainer: type[Any]) -> TrainerPlan:
    """Return the plan that ``trainer`` names, or the default for a class that uses the name for something else."""
    if isinstance(trainer.plan, TrainerPlan):
        raise TypeError(f"{trainer.__name__}.plan is an instance: name the class, without parentheses")
    plan = trainer.plan if isinstance(trainer.plan, type) and issubclass(trainer.plan, TrainerPlan) else TrainerPlan
    return plan(trainer)


def call_hook(owner: type[Any], name: str, default: T, *arguments: Any) -> T:
    """Call the class method ``name`` that a user's class may have; return ``default`` if it has none."""
    hook: Callable[..., T] | None = getattr(owner, name, None)
    return default if hook is None else hook(*arguments)
