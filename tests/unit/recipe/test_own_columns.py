# SPDX-License-Identifier: Apache-2.0
"""Columns that a rollout engine from outside declares, on their way to a loss from outside: two files, and no other."""

import numpy as np
import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.master.job import check_job
from tests.support import column_engine, column_loss
from tests.support.policy_jobs import finished, policy_job

LOSS = {"name": "tests.support.column_loss:Doubtful"}
ENVIRONMENT = """
async def step(state, action, extra_info):
    return {"next_state": f"{state}{action}? ", "reward": float(len(set(action))), "done": False,
            "extra_info": extra_info}
"""


def run(folder, **rollout):
    for record in (column_engine.generated, column_loss.annotated, column_loss.arrived):
        record.clear()
    sizes = {"samples_per_prompt": 4, "max_new_tokens": 5} | rollout
    engine = {"threads": 1, "rollout": "tests.support.column_engine:MarginEngine"}
    config = {"reward": {}} if "env_path" in rollout else {}
    finished(policy_job(folder, "grpo", rollout=sizes, engine=engine, algorithm=LOSS, **config))
    return {tuple(tokens[at] for at in range(len(tokens))) for tokens in column_engine.generated.values()}


def rows_of_losses():
    """Yield the tokens of each row at a loss (log-prob, margin and the two likely ids), and its column per sample."""
    for columns in column_loss.arrived:
        values = {name: column.numpy() for name, column in columns.items()}
        for unit in np.unique(values["unit"]):
            own = {name: column[values["unit"] == unit] for name, column in values.items()}
            yield (
                [
                    (logprob, margin, *likely)
                    for logprob, margin, likely in zip(
                        own["rollout_logprobs"], own["margin"], own["likely"].tolist(), strict=True
                    )
                ],
                own["passes"],
            )


def split_turns(tokens, completions):
    """The completions that a row's tokens consist of; fails if they are not whole ones."""
    turns = []
    while tokens:
        turn = next(each for each in completions if each == tuple(tokens[: len(each)]))
        turns, tokens = [*turns, turn], tokens[len(turn) :]
    return turns


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_engine_columns_arrive_at_the_loss_token_by_token(tmp_path, turns, max_staleness):
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    asks = {"env_path": str(tmp_path / "asks.py"), "env_isolated": False, "max_turns": turns} if turns > 1 else {}
    generated = run(tmp_path, max_staleness=max_staleness, **asks)
    completions = {tuple(token[1:] for token in tokens) for tokens in generated}
    rows = [(split_turns(tokens, completions), passes) for tokens, passes in rows_of_losses()]
    assert len(rows) == 3 * 4 * 4
    assert {len(parts) for parts, _ in rows} == {turns}
    assert all(set(passes) == {len(parts[-1])} for parts, passes in rows)


def test_engine_columns_are_filled_outside_the_policys_tokens(tmp_path):
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    run(tmp_path, env_path=str(tmp_path / "asks.py"), env_isolated=False, max_turns=3)
    for rows in column_loss.annotated:
        assert rows.dense("passes").min() >= 1
        for margin, is_action in zip(rows.ragged("margin"), rows.ragged("action_mask"), strict=True):
            assert len(margin) == len(is_action)
            assert (margin[~is_action] == -1).all()
            assert (margin[is_action] >= 0).all()


@pytest.mark.parametrize(
    ("engine", "algorithm", "fault"),
    [
        ("torch", LOSS, "config.algorithm: it needs likely, margin, passes, which this trainer does not have"),
        (
            "tests.support.column_engine:ClashingEngine",
            {"name": "grpo"},
            "config.engine.rollout: declares a column 'ref_logprobs', which the trainer has already",
        ),
    ],
)
def test_columns_without_one_producer_are_refused(tmp_path, engine, algorithm, fault):
    job = policy_job(tmp_path, "grpo", engine={"threads": 1, "rollout": engine}, algorithm=algorithm)
    with pytest.raises(InvalidJob) as refused:
        check_job(job, local=True)
    assert fault in map(str, refused.value.errors)
