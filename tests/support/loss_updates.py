# SPDX-License-Identifier: Apache-2.0
"""Random ragged updates as plain lists and as batches, and what an engine does with them between ``annotate`` and
``loss``: packing, micro-batches, ranks."""

from dataclasses import dataclass

import numpy as np
import torch

from dlrover.python.rl.algorithm.base import EngineLoss, select_added
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.packing import pack, select_columns

COLUMNS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values")
TEACHERS, IDS = 2, 3


def ragged_update(seed: int, trajectories: bool = False, rows: int = 16) -> Batch:
    """Groups of four samples with observations between actions; a failed row, and one without an action.

    ``tokens`` number the tokens of the update, so that a test knows each again wherever it has got to. Samples of one
    prompt are not neighbours. With ``trajectories`` a sample is one to three rows.
    """
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
    batch = Batch(
        {
            "tokens": flat.like(np.arange(total)),
            "action_mask": flat,
            "prompt_id": prompt_of_sample[sample],
            "reward": reward,
            "action_tokens": np.array([int(row.sum()) for row in mask]),
            "teacher_logprobs": flat.like(-rng.exponential(1.0, (total, TEACHERS)).astype(np.float32)),
            "teacher_weights": rng.dirichlet(np.ones(TEACHERS), size=rows),
            **noisy,
        }
    )
    return batch.with_columns(trajectory=sample) if trajectories else batch


def logprobs_for(batch: Batch, seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    """Log-probs of all tokens under a policy that has moved a little, float64 ``[tokens of the update]``."""
    noise = np.random.default_rng((seed, 1)).normal(0, scale, len(batch.ragged("tokens").values))
    return torch.from_numpy(batch.ragged("old_logprobs").values.astype(np.float64) + noise)


@dataclass
class Outcome:
    """``gradient``: of the outputs, then of what the engine made."""

    loss: float
    gradient: torch.Tensor
    metrics: dict


def outcome(
    algorithm, rows: Batch, outputs: torch.Tensor, order=None, ranks=1, budget=10_000, loss=None, **made
) -> Outcome:
    """Annotate and run the loss as engines do.

    Args:
        outputs: of each token of the update.
        order: of the rows.
        ranks: over which units are dealt.
        budget: tokens of a micro-batch.
        loss: instead of the algorithm's.
        made: columns that the engine makes, for each token of the update.
    """
    rows = rows if order is None else rows.take(list(order))
    extra = select_added(rows, algorithm.annotate(rows))
    batch = rows.with_columns(**extra.columns)
    unit = batch.dense("unit") if "unit" in batch else np.arange(len(batch))
    leaf = outputs.clone().requires_grad_()
    made = {name: values.clone().requires_grad_() for name, values in made.items()}
    loss, total, metrics = loss or EngineLoss(algorithm), 0.0, {}
    for rank in range(ranks):
        mine = np.flatnonzero(unit % ranks == rank)
        part = batch.take(mine.tolist())
        for micro in pack(part, budget) if len(mine) else []:
            columns = select_columns(part, micro.flat, "cpu")
            places = torch.from_numpy(micro.targets)
            columns |= {name: values[places] for name, values in made.items()}
            value, told = loss(leaf[places], columns)
            value.backward()
            total += value.item()
            assert not any(figure.requires_grad for figure in told.values())
            metrics = {name: metrics.get(name, 0.0) + float(figure) for name, figure in told.items()}
    leaves = [leaf, *made.values()]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]
    return Outcome(total, torch.cat([gradient.flatten() for gradient in gradients]), metrics)


def assert_same(found: Outcome, expected: Outcome, tolerance=1e-6) -> None:
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=0, atol=tolerance)
    assert abs(found.loss - expected.loss) < tolerance
    assert found.metrics.keys() == expected.metrics.keys()
    for name, figure in found.metrics.items():
        assert abs(figure - expected.metrics[name]) < 10 * tolerance, name


# -- plain lists ------------------------------------------------------------------------------------------------------


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
    found = [sample for sample in samples.values() if sample["actions"] and not np.isnan(sample["reward"])]
    for sample in found:
        sample["actions"][0]["reward"] += sample.get("early", 0.0)
    return found


def plain_weight(samples: list[dict], sample: dict, averaging: str) -> float:
    tokens = sum(len(other["actions"]) for other in samples)
    of_sequences = len(samples) * len(sample["actions"])
    return {"token": 1 / tokens, "sequence": 1 / of_sequences, "sum": 1 / len(samples)}[averaging]
