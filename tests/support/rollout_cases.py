# SPDX-License-Identifier: Apache-2.0
"""The engines that the contract of rollout engines runs over, and the plain reference that it compares them with."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.model.spec import load_causal_lm
from tests.support import sglang_stand_in, torch_models

TEXTS = ["a", "what is the answer to this?", "37+45=", "a longer prompt than all of the others, by far", "xyz"]
EOS = torch_models.EOS

ON_CUDA = {"compile": False, "kv_cache_bytes": 1 << 26, "engine_args": {"gpu_memory_utilization": 0.1}}
"""So that vLLM starts quickly, and in a part of the device."""


@dataclass(frozen=True)
class Kind:
    """An engine that the suite runs over: ``label`` to the tests, ``name`` in the registry."""

    label: str
    name: str
    needs: tuple[str, ...] = ()  # what has to be here for it
    device: str = "cpu"
    backend: dict = field(default_factory=dict)  # its own options
    hidden: int = 32  # width of the model; vLLM's kernels for CPUs want heads of at least 32
    tells_cut: bool = True  # it gives the log-probs of a distribution that was cut
    longest: int = 128  # tokens of a sequence at most, of a model with 128 positions

    def make(self, model, memory=None, **settings):
        settings = RolloutSettings(**{"max_batch": 8, "device": self.device, "backend": self.backend, **settings})
        return engine_class(ROLLOUT_ENGINES, self.name)(model, settings, memory)


@dataclass(frozen=True)
class SglangKind(Kind):
    """SGLang's place is taken by a server that speaks its protocol."""

    def make(self, model, memory=None, **settings):
        _, url, close = sglang_stand_in.serve(model)
        engine = super().make(model, memory, **{"backend": {**self.backend, "url": url}, **settings})
        ends = engine.close
        engine.close = lambda: (ends(), close())
        return engine


KINDS = (
    Kind("torch", "torch"),
    Kind("torch-huggingface", "torch", backend={"forward": "huggingface"}),
    Kind("torch-cuda", "torch", ("cuda",), "cuda"),
    Kind("torch-huggingface-cuda", "torch", ("cuda",), "cuda", backend={"forward": "huggingface"}),
    Kind("vllm", "vllm", ("vllm", "no cuda"), hidden=128),
    Kind("vllm-cuda", "vllm", ("vllm", "cuda"), "cuda", hidden=128, backend=ON_CUDA),
    SglangKind("sglang", "sglang", backend={"chunk_tokens": 1}, tells_cut=False, longest=122),
)


def as_parameter(kind):
    """vLLM warns of what it uses itself; the server that stands in for SGLang reads everything again for each token."""
    marks = {"vllm": [pytest.mark.filterwarnings("default")], "sglang": [pytest.mark.slow]}
    return pytest.param(kind, id=kind.label, marks=[pytest.mark.needs(*kind.needs), *marks.get(kind.name, [])])


def snapshot(path, version, scale=1.0):
    """Return the weights of a model in a folder, each times ``scale``."""
    return take_snapshot(((name, tensor * scale) for name, tensor in load_causal_lm(path).named_weights()), version)


class Reference:
    """The model itself, asked the slow way: without a cache, without a batch."""

    def __init__(self, path):
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def snapshot(self, version, scale=1.0):
        return snapshot(self.path, version, scale)

    @torch.no_grad()
    def logprobs(self, tokens, temperature):
        """``[seq - 1, vocab]``: of each token after the first."""
        logits = self.model(torch.tensor([list(tokens)])).logits[0, :-1]
        return torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)

    def greedy(self, prompt, count):
        return torch_models.greedy(self.model, prompt, count)


def prompts(texts=TEXTS, first_id=0):
    rows = [list(text.encode()) for text in texts]
    ids = np.arange(first_id, first_id + len(rows))
    return Batch({"prompt_id": ids, "tokens": Ragged.from_rows(rows, dtype=np.int64)})


def sampling(**changes):
    return dataclasses.replace(SamplingParams(max_new_tokens=24, temperature=1.0), **changes)


def completions(out):
    pairs = zip(out.ragged("tokens"), out.ragged("action_mask"), strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


def requests(texts=TEXTS, samples=1):
    numbered = [(number, index, text) for number, text in enumerate(texts) for index in range(samples)]
    return [Request.fresh(number, index, list(text.encode())) for number, index, text in numbered]


def drain(engine):
    """Advance until nothing runs; completions by key."""
    done = {}
    while engine.running:
        done.update({item.request.key: item for item in engine.advance()})
    return done


def drawn(done):
    """Tokens by key."""
    return {key: item.request.done.tolist() for key, item in done.items()}
