# SPDX-License-Identifier: Apache-2.0
"""The reference for every train engine: a model, batches, a loss, and five steps the plain way, a row at a time."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.model.loading import write_atomically
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from tests.support.torch_models import DECODER

CONFIG = OptimizerConfig(lr=5e-4, warmup_steps=3, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=0.5)
STEPS = 5
TEMPERATURE = 0.8
CANDIDATES = 3
TOKENIZER_IDS = 259
"""The model has a row more, as others have hundreds: its id has probability 0."""
LENGTHS = [(3, 9), (1, 2), (7, 30), (2, 1), (4, 12), (5, 5), (1, 20), (6, 3)]

NO_GRADIENT = "k_proj.bias"
"""Attention does not change with a key's bias: its gradient is zero but for rounding, which Adam makes steps of."""

DOUBTFUL = 5
"""Weights of a model that may be off by more than the tolerance, at most."""


def write_model(path, vocab_size=260, kind=Qwen2ForCausalLM, **shape):
    """A Qwen2 with random weights and tied embeddings; two key-value heads."""
    return write_random(path, kind(model_config(Qwen2Config, vocab_size=vocab_size, tie_word_embeddings=True, **shape)))


def model_config(kind, **shape):
    """The sizes of a small model."""
    sizes = {"vocab_size": 260, "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.06}
    return kind(**DECODER | sizes | shape)


def write_random(path, model):
    """The model with other random weights, the same at each call, and its tokenizer."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # Zeros in a bias, or ones in a norm, would hide an error in using them.
        spread = 0.1 if parameter.ndim == 1 else 0.06
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, spread, generator=generator)
    return write_atomically(path, model, make_byte_tokenizer())


def make_batch(seed=0):
    """Rows of unequal lengths, with a hole in each long action mask, as a tool's answer leaves one."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, head + tail) for head, tail in LENGTHS]
    masks = [np.arange(head + tail) >= head for head, tail in LENGTHS]
    for mask in masks:
        if len(mask) > 14:
            mask[10:13] = False
    ragged = Ragged.from_rows(tokens)
    old = ragged.like(generator.normal(size=len(ragged.values)) - 5)
    weight = generator.uniform(0.5, 1.5, len(LENGTHS)).astype(np.float32) / 50
    candidates = ragged.like(generator.integers(0, 256, (len(ragged.values), CANDIDATES)))
    columns = {"tokens": ragged, "action_mask": Ragged.from_rows(masks), "old": old, "weight": weight}
    return Batch({**columns, "candidates": candidates})


class EntropyLoss:
    """Something that uses a column of each kind, the entropy, and log-probs of other ids."""

    wants_entropy = True

    def __call__(self, logprobs, columns):
        """Weighted sum over the tokens."""
        terms = torch.exp(0.1 * (logprobs - columns["old"])) - logprobs - 0.3 * columns["entropy"]
        terms = terms + columns["candidate_logprobs"].exp().sum(dim=1)
        return (columns["weight"] * terms).sum(), {"entropy": (columns["weight"] * columns["entropy"]).sum()}


def plain_outputs(model, tokens, mask, candidates):
    """Log-probs and entropies ``[actions]`` of one row, over the tokenizer's ids at every position, and the log-probs
    of its candidates ``[actions, n]``."""
    ids, chosen = torch.tensor(tokens), torch.tensor(mask[1:])
    table = torch.log_softmax(model(ids[None]).logits[0, :-1, :TOKENIZER_IDS] / TEMPERATURE, dim=-1)
    logprobs = table[torch.arange(len(ids) - 1), ids[1:]]
    candidate_logprobs = table.gather(1, torch.tensor(candidates)[1:])
    return logprobs[chosen], -(table.exp() * table).sum(dim=-1)[chosen], candidate_logprobs[chosen]


def plain_loss(model, batch):
    """The loss of a batch, a row at a time, and its metric."""
    loss = EntropyLoss()
    total, entropy = torch.zeros(()), torch.zeros(())
    names = ("tokens", "action_mask", "old", "candidates")
    rows = zip(*(batch.ragged(name) for name in names), batch.dense("weight"), strict=True)
    for tokens, mask, old, candidates, weight in rows:
        logprobs, entropies, candidate_logprobs = plain_outputs(model, tokens, mask, candidates)
        columns = {
            "candidate_logprobs": candidate_logprobs,
            "old": torch.tensor(old, dtype=torch.float32)[torch.tensor(mask)],
            "weight": torch.full((len(logprobs),), weight),
            "entropy": entropies,
        }
        value, metrics = loss(logprobs, columns)
        total, entropy = total + value, entropy + metrics["entropy"]
    return total, entropy


def plain_model(path, kind=AutoModelForCausalLM):
    """The model as the library loads it, with its own slowest attention."""
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def score_loss(scores, columns):
    """Squared distance from a column, weighted."""
    return (columns["weight"] * (scores - columns["old"]).square()).sum(), {"scores": scores.abs().sum() / 50}


def plain_scores(model, tokens, mask):
    """Scores ``[actions]`` of one row."""
    return model(torch.tensor(tokens)[None]).logits[0, :, 0][torch.tensor(mask)]


def plain_score_loss(model, batch):
    """:func:`score_loss` of a batch, a row at a time, and its metric."""
    total, metric = torch.zeros(()), torch.zeros(())
    rows = zip(*(batch.ragged(name) for name in ("tokens", "action_mask", "old")), batch.dense("weight"), strict=True)
    for tokens, mask, old, weight in rows:
        scores = plain_scores(model, tokens, mask)
        columns = {"old": torch.tensor(old[mask], dtype=torch.float32), "weight": torch.tensor(weight)}
        value, metrics = score_loss(scores, columns)
        total, metric = total + value, metric + metrics["scores"]
    return total, metric


class PlainAdamW:
    """AdamW with its formula written out (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    A step divides a gradient by its own size, so where one is next to nothing its rounding becomes a part of the step:
    ``unsure`` sums up how large a part, for each weight.
    """

    def __init__(self, named):
        self.named, self.steps = named, 0
        self.first, self.second, self.rounded, self.unsure = (
            {name: torch.zeros_like(tensor) for name, tensor in named.items()} for _ in range(4)
        )

    @torch.no_grad()
    def step(self, lr, scale):
        """One step at rate ``lr`` with the gradients times ``scale``."""
        self.steps += 1
        corrections = [1 - beta**self.steps for beta in CONFIG.betas]
        for name, tensor in self.named.items():
            gradient = tensor.grad * scale
            self.first[name].lerp_(gradient, 1 - CONFIG.betas[0])
            self.second[name].lerp_(gradient.square(), 1 - CONFIG.betas[1])
            decay = CONFIG.weight_decay if tensor.ndim >= 2 else 0.0
            root = (self.second[name] / corrections[1]).sqrt() + 1e-8
            tensor.sub_(lr * decay * tensor + lr * self.first[name] / corrections[0] / root)
            rounding = torch.finfo(torch.float32).eps * gradient.abs().max() * (gradient != 0)
            self.rounded[name].lerp_(rounding, 1 - CONFIG.betas[0])
            self.unsure[name] += lr * self.rounded[name] / corrections[0] / root


class PlainWeights(dict):
    """Weights by name, and how far each may be off since gradients are rounded."""

    def __init__(self, named, unsure):
        super().__init__((name, tensor.detach().numpy()) for name, tensor in named.items())
        self.unsure = {name: tensor.numpy() for name, tensor in unsure.items()}


def plain_run(path):
    """Five steps, a row at a time; what an engine should report, and the weights at the end."""
    return plain_steps(plain_model(path), plain_loss, "entropy")


def plain_steps(model, loss_of, metric):
    """Run :func:`plain_run`'s steps for any model and ``loss_of(model, batch) -> (loss, metric)``."""
    named = dict(model.named_parameters())
    optimizer, reports = PlainAdamW(named), []
    for step in range(STEPS):
        model.zero_grad()
        loss, value = loss_of(model, make_batch(step))
        loss.backward()
        norm = torch.sqrt(sum(tensor.grad.double().square().sum() for tensor in named.values())).item()
        lr = CONFIG.lr * min(1.0, (step + 1) / CONFIG.warmup_steps)
        reports.append({"loss": loss.item(), "grad_norm": norm, "lr": lr, metric: value.item()})
        optimizer.step(lr, min(1.0, CONFIG.max_grad_norm / norm))
    return reports, PlainWeights(named, optimizer.unsure)


def reported(step):
    """Return an engine's report of a step in the form of :func:`plain_run`."""
    return {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, **step.metrics}


def assert_close(actual, expected, tolerance=1e-5):
    """Weights by name."""
    assert actual.keys() == expected.keys()
    unsure = getattr(expected, "unsure", {})
    doubtful = sum(int((of > tolerance).sum()) for name, of in unsure.items() if not name.endswith(NO_GRADIENT))
    assert doubtful <= DOUBTFUL, f"rounding decides {doubtful} weights: too many to compare"
    for name in actual:
        allowed = 3 * STEPS * CONFIG.lr if name.endswith(NO_GRADIENT) else tolerance + unsure.get(name, 0.0)
        difference = np.abs(actual[name] - expected[name])
        assert (difference < allowed).all(), (name, difference.max())


def apart(actual, expected, start):
    """Return the distance of weights from the expected ones, as a share of these ones' distance from the start."""
    names = [name for name in expected if not name.endswith(NO_GRADIENT)]
    off = sum(float(np.square(actual[name] - expected[name]).sum()) for name in names)
    way = sum(float(np.square(expected[name] - start[name]).sum()) for name in names)
    return (off / way) ** 0.5


def start_weights(path):
    """Return the weights by name."""
    return {name: parameter.detach().numpy() for name, parameter in plain_model(path).named_parameters()}
