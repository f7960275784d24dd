# SPDX-License-Identifier: Apache-2.0
"""Small batches for the fsdp2 engine, a step on one of them, and the engine's bits."""

import numpy as np

from dlrover.python.rl.data.batch import Batch, Ragged

LENGTHS = (9, 4, 17, 6)


def make_batch(seed=0, lengths=LENGTHS):
    """Rows of random bytes; all tokens but the first two of a row are actions."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in lengths]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def token_loss(outputs, columns):
    return -outputs.sum() / 20, {"tokens": float(len(outputs))}


def share(engine, rank, batch):
    """The rows of the rank's replica."""
    place = engine.layout.coordinates(rank)
    return batch.split(engine.layout.data_parallel_size)[place.ddp * engine.layout.shard + place.shard]


def step(engine, seed=0, rank=0, lengths=LENGTHS):
    return engine.step(share(engine, rank, make_batch(seed, lengths)), token_loss)


def logprobs(engine):
    return engine.evaluate(make_batch()).ragged("logprobs").values


def weights(engine, dtype=None):
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights(dtype)}


def bits(engine, dtype=None):
    """Each weight's type and bytes."""
    tensors = weights(engine, dtype)
    return {name: (str(tensor.dtype), tensor.float().numpy().tobytes()) for name, tensor in tensors.items()}
