# SPDX-License-Identifier: Apache-2.0
"""Ragged updates as plain lists and as batches, and an engine's work between ``annotate`` and ``loss``: packing,
micro-batches, ranks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.base import EngineLoss, select_added
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.packing import pack, select_columns

COLUMNS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values")
TEACHERS = 2


def rows_of(prompt_id, reward, action_tokens) -> Batch:
    numbers = {"prompt_id": prompt_id, "action_tokens": action_tokens}
    columns = {name: np.array(values, dtype=np.int64) for name, values in numbers.items()}
    return Batch({**columns, "reward": np.array(reward, dtype=np.float64)})


def token_rows(masks, values, rewards, **more) -> Batch:
    mask = Ragged.from_rows(masks, dtype=np.bool_)
    rows = rows_of(np.arange(len(masks)), rewards, [int(np.sum(row)) for row in masks])
    tokens, values = mask.like(np.arange(len(mask.values))), Ragged.from_rows(values, dtype=np.float32)
    return rows.with_columns(tokens=tokens, action_mask=mask, values=values, **more)


def run(algorithm, annotated: Batch, logprobs, old=None):
    """Loss, gradient and metrics; the flat log-probs ``old`` also serve as the reference's."""
    lengths, leaf = annotated.dense("action_tokens"), logprobs.clone().requires_grad_()
    old = logprobs if old is None else old
    columns = {
        name: torch.from_numpy(np.repeat(annotated.dense(name), lengths))
        for name in ("advantage", "weight")
        if name in annotated
    }
    loss, metrics = algorithm.loss(leaf, {**columns, "old_logprobs": old, "ref_logprobs": old})
    loss.backward()
    return float(loss.detach()), leaf.grad, {name: float(value) for name, value in metrics.items()}


def ragged_update(seed: int, trajectories: bool = False, rows: int = 16) -> Batch:
    """Groups of four samples with observations between actions; a failed row, and one without an action.

    ``tokens`` number the tokens of the update. Samples of one prompt are not neighbours. With ``trajectories`` a sample
    is one to three rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 12, size=rows)
    mask = [np.concatenate([[False], rng.random(length - 1) < 0.6]) for length in lengths]
    mask[7][:] = False
    flat = Ragged.from_rows(mask, dtype=np.bool_)
    total = len(flat.values)
    sample = np.sort(rng.integers(0, rows // 2, size=rows)) if trajectories else np.arange(rows)
    prompt_of_sample = rng.permutation(np.repeat([3, 7, 8, 20], 4))
    reward = rng.integers(0, 3, size=rows).astype(float)
    reward[5] = np.nan
    old = -rng.exponential(1.0, total)
    noisy = {name: flat.like((old + rng.normal(0, 0.3, total)).astype(np.float32)) for name in COLUMNS}
    noisy["old_logprobs"] = flat.like(old.astype(np.float32))
    teachers = {"teacher_logprobs": flat.like(-rng.exponential(1.0, (total, TEACHERS)).astype(np.float32))}
    teachers |= {"teacher_weights": rng.dirichlet(np.ones(TEACHERS), size=rows)}
    batch = rows_of(prompt_of_sample[sample], reward, [int(row.sum()) for row in mask])
    batch = batch.with_columns(tokens=flat.like(np.arange(total)), action_mask=flat, **teachers, **noisy)
    return batch.with_columns(trajectory=sample) if trajectories else batch


def logprobs_for(batch: Batch, seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    """Log-probs of all tokens under a policy that has moved a little, float64 ``[tokens of the update]``."""
    noise = np.random.default_rng((seed, 1)).normal(0, scale, len(batch.ragged("tokens").values))
    return torch.from_numpy(batch.ragged("old_logprobs").values.astype(np.float64) + noise)


@dataclass
class Outcome:
    """``gradient``: of the outputs, then of the engine's columns."""

    loss: float
    gradient: torch.Tensor
    metrics: dict


def outcome(
    algorithm, rows: Batch, outputs: torch.Tensor, order=None, ranks=1, budget=10_000, loss=None, **extra
) -> Outcome:
    """Annotate and run the loss as engines do: ``outputs`` and ``extra`` columns are of each token of the update,
    ``budget`` limits the tokens of a micro-batch, units are dealt over ``ranks``."""
    rows = rows if order is None else rows.take(list(order))
    batch = rows.with_columns(**select_added(rows, algorithm.annotate(rows)).columns)
    unit = batch.dense("unit") if "unit" in batch else np.arange(len(batch))
    leaf = outputs.clone().requires_grad_()
    extra = {name: values.clone().requires_grad_() for name, values in extra.items()}
    loss, total, metrics = loss or EngineLoss(algorithm), 0.0, {}
    for rank in range(ranks):
        mine = np.flatnonzero(unit % ranks == rank)
        part = batch.take(mine.tolist())
        for micro in pack(part, budget) if len(mine) else []:
            columns = select_columns(part, micro.flat, "cpu")
            places = torch.from_numpy(micro.targets)
            columns |= {name: values[places] for name, values in extra.items()}
            value, figures = loss(leaf[places], columns)
            value.backward()
            total += value.item()
            assert not any(figure.requires_grad for figure in figures.values())
            metrics = {name: metrics.get(name, 0.0) + float(figure) for name, figure in figures.items()}
    leaves = [leaf, *extra.values()]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]
    return Outcome(total, torch.cat([gradient.flatten() for gradient in gradients]), metrics)


def assert_same(actual: Outcome, expected: Outcome, tolerance=1e-6) -> None:
    torch.testing.assert_close(actual.gradient, expected.gradient, rtol=0, atol=tolerance)
    assert abs(actual.loss - expected.loss) < tolerance
    assert actual.metrics == pytest.approx(expected.metrics, abs=10 * tolerance)


def plain_samples(batch: Batch) -> list[dict]:
    """Each sample that counts: ``prompt``, ``reward`` (summed) and ``actions``, in order: dicts with ``at`` (number of
    the token), ``reward`` (of its row, on the row's last action) and each ragged column."""
    samples: dict[int, dict] = {}
    for number in range(len(batch)):
        row = batch.row(number)
        sample = samples.setdefault(
            int(row.get("trajectory", number)), {"prompt": row["prompt_id"], "reward": 0.0, "actions": []}
        )
        sample["reward"] += row["reward"]
        actions = []
        for at in np.flatnonzero(row["action_mask"]):
            metrics = {name: float(row[name][at]) for name in COLUMNS}
            actions.append({"at": int(row["tokens"][at]), "reward": 0.0, **metrics})
        sample["actions"] += actions
        if sample["actions"]:
            sample["actions"][-1]["reward"] += row["reward"]
        else:
            sample["early"] = sample.get("early", 0.0) + row["reward"]
    counted = [sample for sample in samples.values() if sample["actions"] and not np.isnan(sample["reward"])]
    for sample in counted:
        sample["actions"][0]["reward"] += sample.get("early", 0.0)
    return counted


def plain_weight(samples: list[dict], sample: dict, averaging: str) -> float:
    tokens = sum(len(other["actions"]) for other in samples)
    of_sequences = len(samples) * len(sample["actions"])
    return {"token": 1 / tokens, "sequence": 1 / of_sequences, "sum": 1 / len(samples)}[averaging]
