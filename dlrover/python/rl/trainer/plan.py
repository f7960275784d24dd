# SPDX-License-Identifier: Apache-2.0
"""``TrainerPlan``: what a trainer's class says about a job before anything starts."""

from collections.abc import Iterable, Mapping
from typing import Any

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType


class TrainerPlan:
    """Checks, completes and describes jobs of the class ``trainer``, of which there is no object yet.

    A trainer names its plan: ``plan = MyPlan``. This one, the default, calls the class methods of the same names that
    the trainer defines, all of which are optional; a plan that extends it adds to their answers."""

    def __init__(self, trainer: type[Any]) -> None:
        self.trainer = trainer

    def check_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        """Validate the job's ``config`` and role sizes."""
        errors: Iterable[ConfigError] = call_hook(self.trainer, "check_config", (), config, roles)
        return errors

    def check_options(self, config: Any) -> Iterable[ConfigError]:
        """Find those errors of :meth:`check_config` that a job has on any machine, beside errors of its schema."""
        errors: Iterable[ConfigError] = call_hook(self.trainer, "check_options", (), config)
        return errors

    def check_workloads(self, workloads: Mapping[RLRoleType, type[Any]]) -> Iterable[ConfigError]:
        """Validate the classes of the roles."""
        errors: Iterable[ConfigError] = call_hook(self.trainer, "check_workloads", (), workloads)
        return errors

    def complete_config(self, config: Any, devices: str) -> Mapping[str, Any] | None:
        """Return the config with the default of every key that it lacks, which then is the job's; None: it has no
        schema.

        ``devices`` is the job's ``device_type``, or ``HERE`` for those of this process. Raises InvalidJob."""
        complete: Mapping[str, Any] | None = call_hook(self.trainer, "complete_config", None, config, devices)
        return complete

    def settings_of_state(self, config: Any) -> Mapping[str, Any]:
        """Return the settings that the saved state of the trainer depends on, by their keys in ``config``; mappings are
        compared key by key, a :class:`~dlrover.python.rl.trainer.workload.Setting` by its ``kind``. A job that would
        continue from a state with others is refused."""
        settings: Mapping[str, Any] = call_hook(self.trainer, "settings_of_state", {}, config)
        return settings

    def describe_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[str]:
        """Return lines about a valid config for ``check`` and the beginning of a run."""
        lines: Iterable[str] = call_hook(self.trainer, "describe_config", (), config, roles)
        return lines


def plan_of(trainer: type[Any]) -> TrainerPlan:
    """Return the plan that ``trainer`` names; the default for a class that uses the name otherwise."""
    plan = trainer.plan if isinstance(trainer.plan, type) and issubclass(trainer.plan, TrainerPlan) else TrainerPlan
    return plan(trainer)


def call_hook(owner: type[Any], name: str, default: Any, *arguments: Any) -> Any:
    """Call the class method ``name`` that a user's class may have; ``default`` where it has none."""
    hook = getattr(owner, name, None)
    return default if hook is None else hook(*arguments)
