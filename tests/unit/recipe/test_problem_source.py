"""The problems of a run: their ids when a batch holds one twice."""

import json

from dlrover.python.rl.recipe.config import GRPOConfig, PromptData
from dlrover.python.rl.recipe.problems import ProblemSource


def source(folder, rows, **more):
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{row}+1=", "answer": row + 1}) + "\n" for row in range(rows)))
    return ProblemSource(GRPOConfig("m", PromptData(str(path), eval=str(path), eval_rows=3), **more))


def test_rows_are_drawn_epoch_after_epoch_however_many_at_a_time(tmp_path):
    drawn, problems = [], source(tmp_path, 8, prompts_per_step=5)
    for count in (3, 0, 8, 5, 16):
        drawn += problems.draw(count)
        assert problems.prompts(drawn[-2:]).objects("prompt") == [f"{row}+1=" for row in drawn[-2:]]
    assert [sorted(drawn[start : start + 8]) for start in (0, 8, 16, 24)] == [list(range(8))] * 4


def test_every_prompt_has_a_place(tmp_path):
    problems = source(tmp_path, 8)
    path = tmp_path / "p.jsonl"
    assert problems.places.objects("place") == [f"{path}:{line}" for line in [*range(1, 9), 1, 2, 3]]
