# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the integration guide, filled in where the guide leaves dots."""

import ray

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation


@ray.remote
class UserActorModel(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)

        # define your actor property
        self.model = None

    def init_model(self):
        # preparation before training
        self.model = self.config.start

    def update_actor(self):
        # policy updating
        self.model += self.rank
        return self.model

    def update(self, parameter_x):
        return self.rank, parameter_x

    @trainer_invocation(blocking=False)
    def a(self, xxx):
        return xxx

    @trainer_invocation(is_async=True, timeout=30)
    def b(self, xxx):
        return xxx


def filter_func(input: int):
    if input < -1:
        return 0
    return input


class UserRolloutModel(BaseWorkload):
    """A plain class is accepted like a decorated one."""

    @trainer_invocation(is_async=True, timeout=30, pre_func=filter_func)
    def a(self, input: int):
        return input + 1

    def generate(self, parameter_0, parameter_1):
        return parameter_0, parameter_1


class UserTrainer(BaseTrainer):
    def __init__(self, actor_handles, actor_classes, config):
        super().__init__(actor_handles, actor_classes, config)

        # define your trainer property
        self.field0 = 0
        self.field1 = "one"

    def init(self):
        # define process logic for training preparation
        self.RG_ACTOR.init_model()

    def fit(self):
        # define the main process logic for training
        assert (self.field0, self.field1) == (0, "one")
        assert self.RG_ACTOR.update_actor() == [10, 11, 12, 13]
        parameter_x, parameter_0, parameter_1 = "x", "p0", "p1"
        assert self.RG_ACTOR.update(parameter_x) == [(rank, "x") for rank in range(4)]
        assert self.RG_ROLLOUT.generate(parameter_0, parameter_1) == [("p0", "p1"), ("p0", "p1")]
        assert self.RG_ACTOR.a(5).result(timeout=30) == [5, 5, 5, 5]
        assert self.RG_ACTOR.b(6) == [6, 6, 6, 6]
        assert self.RG_ROLLOUT.a(7) == [8, 8]
        assert self.RG_ROLLOUT.a(-5) == [1, 1]
