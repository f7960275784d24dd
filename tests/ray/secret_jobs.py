# SPDX-License-Identifier: Apache-2.0
"""A job that has secrets, and tells by files whether they have reached it."""

import json
import logging
import os
import time
from pathlib import Path

from omegaconf import OmegaConf

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload


class Holder(BaseWorkload):
    def held(self):
        names = ("API_KEY", "MEMBER_TOKEN", "CLUSTER_API_KEY")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        return {**variables, "config": OmegaConf.to_container(self.config.secret_settings)}

    def fail(self):
        """Return all secrets of the job, as they are and as ``repr`` writes them."""
        secrets = {name: value for name, value in self.held().items() if name != "CLUSTER_API_KEY"}
        logging.getLogger("dlrover.secret_jobs").warning("held: %s", secrets["config"].get("pem"))
        raise RuntimeError(f"it fails as it was told to, with {secrets}\n{secrets['config'].get('pem')}")


class HoldingTrainer(BaseTrainer):
    """Notes what its worker holds after each step; ``config.ends`` is ``well``, ``badly``, or ``cancelled``, which it
    waits for."""

    def init(self):
        pass

    def fit(self):
        settings = self.config.settings
        for step in self.steps(10**6 if settings.ends == "cancelled" else settings.steps):
            (secrets,) = self.RG_ACTOR.held()
            assert secrets["config"] == OmegaConf.to_container(self.config.secret_settings)
            (Path(settings.folder) / "held").write_text(json.dumps(secrets))
            self.log(step, reward=1.0)
            time.sleep(0.1)
        if settings.ends == "badly":
            self.RG_ACTOR.fail()
