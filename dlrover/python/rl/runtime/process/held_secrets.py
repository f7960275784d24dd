# SPDX-License-Identifier: Apache-2.0
"""The job's secrets in one of its processes: in its memory and environment, and nowhere else."""

import os

from dlrover.python.rl.common.redaction import hide_values
from dlrover.python.rl.config.secrets import Secrets, seal, variables_of
from dlrover.python.rl.config.spec import JobSpec

_HELD: dict[str, str] = {}


def take_secrets(job: JobSpec, role: str = "") -> None:
    """Give this process the secret variables of the trainer or a ``role``, which did not come with its environment."""
    _, secrets = seal(job)
    hide_values(secrets.values())
    os.environ.update(variables_of(secrets, role))
    _HELD.update(secrets)


def held_secrets() -> Secrets:
    """What this process was given, for a master that has none left."""
    return dict(_HELD)
