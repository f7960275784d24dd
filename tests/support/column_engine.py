# SPDX-License-Identifier: Apache-2.0
"""A rollout engine from outside the package, which declares columns that no other engine has, and a loss that names
them."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.data.batch import ColumnSpec
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.api.weights import verify_snapshot
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.rollout.requests import RolloutEngineBase, RunningRequests
from dlrover.python.rl.engine.rollout.sampling import choose

generated = defaultdict(dict)
"""Records the token, log-prob, margin and likely ids at each position, by a request's key, seed and prompt."""


class MarginEngine(RolloutEngineBase):
    """Runs the whole sequence for each token, and reports how far the two most likely ones are apart."""

    info = EngineInfo(
        columns={
            "margin": ColumnSpec("float32", fill=-1),
            "likely": ColumnSpec("int64", fill=-2, shape=(2,)),
            "passes": ColumnSpec("int64", per="sample"),
        }
    )

    def __init__(self, model, settings, memory=None):
        lm = load_causal_lm(model)
        self._model = lm.model
        self._requests = RunningRequests(replace(lm, model=None), columns=self.info.columns)

    def _check_ready(self):
        assert self.version >= 0

    @torch.no_grad()
    def _step(self, max_tokens):
        new_tokens = []
        for number, running in self._requests.by_number.items():
            logits = self._model(torch.as_tensor(running.sequence)[None]).logits[:, -1]
            token, logprob = choose(logits, running.sampling, torch.tensor([running.next_uniform()]).double())
            best = logits[0].topk(2)
            margin, likely = float(best.values[0] - best.values[1]), best.indices.numpy()
            values = {"margin": margin, "likely": likely, "passes": len(running.tokens) + 1}
            place = (running.request.key, running.seed, running.request.prompt.tobytes())
            numbers = np.float32(float(logprob)), np.float32(margin)
            generated[place][len(running.tokens)] = (int(token), *numbers, *likely.tolist())
            new_tokens.append((number, int(token), float(logprob), values))
        return self._requests.append(new_tokens, self.version)

    def receive(self, weights, rewind=False):
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        verify_snapshot(weights, shapes, serving=-1 if rewind else self.version)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.tensor(name))
        self.version = weights.version

    def close(self):
        self.abort()


class ClashingEngine(MarginEngine):
    info = EngineInfo(columns={"ref_logprobs": ColumnSpec()})


annotated, arrived = [], []


@dataclass(frozen=True)
class Doubtful(GRPO):
    """GRPO that is trained more on tokens at which the policy was in doubt."""

    @property
    def needs(self):
        annotate = super().needs.annotate | {"action_mask", "margin", "passes"}
        return replace(super().needs, annotate=annotate, loss=super().needs.loss | {"margin", "likely", "passes"})

    def annotate(self, rows):
        annotated.append(rows)
        return super().annotate(rows)

    def loss(self, logprobs, columns):
        arrived.append({name: column.detach() for name, column in columns.items()})
        return super().loss(logprobs, {**columns, "weight": columns["weight"] / (1.0 + columns["margin"])})
