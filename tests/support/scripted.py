# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that says what it is told to, a byte at a time, and rolls samples for environments."""

import math
from contextlib import contextmanager

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Completion, Request, SamplingParams
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from dlrover.python.rl.recipe.roles.rollout import InlineLoop
from dlrover.python.rl.recipe.rollout.scheduler import RolloutScheduler


class Scripted:
    """Each completion is ``say(context, sample_index)`` and the end of sequence; a token of each in every step.

    ``longest``: tokens of a sequence at most. ``seeds``: of every request, by its key and the length of its prompt.
    """

    def __init__(self, say, longest=4096):
        self._say, self._longest = say, longest
        self.tokenizer, self.version = make_byte_tokenizer(), 0
        self._running, self.steps, self.seeds = {}, 0, {}

    def check(self, tokens, sampling):
        longest = max(map(len, tokens)) + 1
        if longest > self._longest or not min(map(len, tokens)):
            raise EngineError(f"{longest} tokens, {self._longest} at most")

    def add(self, requests, sampling, seed):
        self.check([request.prompt for request in requests], sampling)
        for request in requests:
            assert request.key not in self._running
            text = self._say(self.tokenizer.decode(request.prompt), request.sample_index)
            room = min(sampling.max_new_tokens, self._longest - len(request.prompt))
            ids = [*text.encode(), self.tokenizer.eos_token_id][:room]
            self.seeds[(*request.key, len(request.prompt))] = seed
            self._running[request.key] = [request, ids, sampling]

    def advance(self):
        self.steps += 1
        ended = []
        for key, (request, ids, _) in list(self._running.items()):
            done = np.append(request.done, ids[len(request.done)])
            columns = np.append(request.logprobs, np.float32(-1)), np.append(request.versions, self.version)
            request = Request(*key, request.prompt, done, *columns)
            self._running[key][0] = request
            if len(done) == len(ids):
                del self._running[key]
                ended.append(self._completion(request, "eos" if ids[-1] >= 256 else "length"))
        return ended

    def _completion(self, request, why):
        return Completion(request, why, self.tokenizer.decode(request.done, skip_special_tokens=True))

    def abort(self, keys=None):
        keys = list(self._running) if keys is None else keys
        return [self._completion(self._running.pop(key)[0], "aborted") for key in keys]

    @property
    def running(self):
        return len(self._running)


SAMPLING = SamplingParams(max_new_tokens=64, samples_per_prompt=1, keep_stop=True)


class Rolling:
    """A scheduler in this thread: its calls, without the workload around them."""

    def __init__(
        self, say, environment=None, max_turns=4, *, room=64, timeout_s=20.0, episodes=None, longest=4096, guard=None,
        **kwargs,
    ):  # fmt: skip
        self.max_new_tokens = 64
        self.engine, self.loop = Scripted(say, longest), InlineLoop()
        self.guard = Guard(environment, timeout_s, episodes) if environment is not None else guard
        self.scheduler = RolloutScheduler(self.engine, self.guard, room, max_turns, **kwargs)

    def sample(self, groups, samples=1, enough=10**6, patience_s=math.inf):
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens, samples_per_prompt=samples, keep_stop=True)
        return self.loop.run(self.scheduler.sample(groups, sampling, 5, enough, patience_s))

    def fetch(self, groups, samples=1):
        self.sample(groups, samples)
        return self.loop.run(self.scheduler.fetch(groups))


@contextmanager
def rolling(say, where=None, *arguments, isolated=False, options=None, **limits):
    """A scheduler for the environment called ``where``, which is shut down at the end."""
    environment = None
    if where is not None:
        environment = (IsolatedEnvironment if isolated else load_environment)(where, options)
    rolled = Rolling(say, environment, *arguments, **limits)
    try:
        yield rolled
    finally:
        rolled.loop.run(rolled.scheduler.close())
        rolled.loop.close()


def groups(*infos, prompt="ask ", created_step=1):
    """A group for each ``extra_info``."""
    count = len(infos)
    numbers = {"prompt_id": range(count), "created_step": [created_step] * count, "retry": [0] * count}
    columns = {"prompt": [prompt] * count, "answer": ["7"] * count, "extra_info": list(infos)}
    return Batch({name: np.array(list(values), dtype=np.int64) for name, values in numbers.items()} | columns)


def texts(batch, name, tokenizer=None):
    """The tokens of each row that the mask ``name`` chooses, as text."""
    tokenizer = tokenizer or make_byte_tokenizer()
    masks = batch.ragged(name)
    return [tokenizer.decode(row[mask]) for row, mask in zip(batch.ragged("tokens"), masks, strict=True)]
