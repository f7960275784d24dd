# SPDX-License-Identifier: Apache-2.0
"""Modules in place of wandb and trackio."""

import types


class FakeWandb(types.ModuleType):
    """Runs by their ids."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.starts, self.axes, self.fails = {}, [], [], False
        self.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, **settings):
        self.starts.append(settings)
        run = self.runs.setdefault(settings["id"], types.SimpleNamespace(steps=[], exit_codes=[]))
        return types.SimpleNamespace(
            log=lambda metrics: self._log(run, **metrics),
            define_metric=lambda name, step_metric="step": self.axes.append((name, step_metric)),
            finish=lambda exit_code: run.exit_codes.append(exit_code),
        )

    def _log(self, run, step, **metrics):
        if self.fails:
            raise ConnectionError("no network")
        run.steps.append((step, metrics))


class FakeTrackio(types.ModuleType):
    """Runs by their names; a run that exists is only opened with ``resume``."""

    def __init__(self):
        super().__init__("trackio")
        self.runs = {}
        self.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, project, *, name, resume, config, embed):
        assert (project, resume, embed) == ("sums", "allow", False)
        run = self.runs.setdefault(name, types.SimpleNamespace(config=config, steps=[], ends=0))

        def finish():
            run.ends += 1

        return types.SimpleNamespace(log=lambda metrics, step: run.steps.append((step, metrics)), finish=finish)
