"""The problems of a run: their ids when a batch holds one twice."""

import json

from dlrover.python.rl.engine.torch.sampling import uniforms
from dlrover.python.rl.recipe.config import GRPOConfig, PromptData
from dlrover.python.rl.recipe.problems import ProblemSource


def source(folder, rows, **more):
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{row}+1=", "answer": row + 1}) + "\n" for row in range(rows)))
    return ProblemSource(GRPOConfig("m", PromptData(str(path), eval=str(path), eval_rows=3), **more))


def test_a_prompt_twice_in_a_batch_is_sampled_anew_in_a_group_of_its_own(tmp_path):
    problems = source(tmp_path, 8, prompts_per_step=16)
    batch = problems.next()
    ids = batch.dense("prompt_id")
    assert sorted(ids.tolist()) == list(range(16))
    assert batch.objects("prompt") == [f"{identity % problems.rows}+1=" for identity in ids]
    draws = {tuple(uniforms((0, 1), identity, sample, 4)) for identity in ids for sample in range(4)}
    assert len(draws) == 16 * 4


def test_an_id_is_the_row_where_no_prompt_comes_twice(tmp_path):
    problems = source(tmp_path, 8, prompts_per_step=8)
    assert [sorted(problems.next().dense("prompt_id").tolist()) for _ in range(2)] == [list(range(8))] * 2


def test_a_batch_across_an_epochs_end_repeats_no_id(tmp_path):
    problems = source(tmp_path, 8, prompts_per_step=5)
    for _ in range(8):
        ids = problems.next().dense("prompt_id")
        assert len(set(ids.tolist())) == 5


def test_every_prompt_has_a_place(tmp_path):
    problems = source(tmp_path, 8)
    path = tmp_path / "p.jsonl"
    assert problems.places.objects("place") == [f"{path}:{line}" for line in [*range(1, 9), 1, 2, 3]]
