"""DLRover RL's short front door. Importing it loads nothing heavy: each name is fetched when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.python.rl.common.roles import RLRoleType
    from dlrover.python.rl.master.job import RLJob, RLJobBuilder
    from dlrover.python.rl.trainer.shard import Replicate, Shard
    from dlrover.python.rl.trainer.trainer import BaseTrainer
    from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

_HOME = {
    "BaseTrainer": "dlrover.python.rl.trainer.trainer",
    "BaseWorkload": "dlrover.python.rl.trainer.workload",
    "RLJob": "dlrover.python.rl.master.job",
    "RLJobBuilder": "dlrover.python.rl.master.job",
    "RLRoleType": "dlrover.python.rl.common.roles",
    "Replicate": "dlrover.python.rl.trainer.shard",
    "Shard": "dlrover.python.rl.trainer.shard",
    "trainer_invocation": "dlrover.python.rl.trainer.workload",
}

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "RLJob",
    "RLJobBuilder",
    "RLRoleType",
    "Replicate",
    "Shard",
    "trainer_invocation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dlrover' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
