# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.feature_table``: writes ``docs/contributing/features.md``, which lists the tests that
show each feature.

A test names the features that it shows in a marker: ``@pytest.mark.feature(111, 112)``.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "contributing" / "features.md"

SECTIONS = {
    "A. Starting and placing": (
        1,
        "one call to begin, on a machine without a GPU",
        "import without optional engines",
        "`torchrun` on one node",
        "`torchrun` on several nodes",
        "`accelerate launch`",
        "replicas fill the machine by default",
        "an explicit data-parallel size",
        "devices shared with another engine",
        "devices apart from another engine",
        "named nodes only",
        "resources come back",
        "your own ports and addresses",
        "your own executor",
        "a choice of rollout backends",
    ),
    "B. Life of an engine": (
        15,
        "use before `build` is refused",
        "a second `build` is refused",
        "`cpu()`",
        '`cuda("weights")`',
        '`cuda("kv_cache")`',
        "`meta()` frees everything",
        "`device()` of both kinds",
        "caches are released",
        "an end that leaves nothing",
    ),
    "C. Your own modules": (
        24,
        "their methods through the engine",
        "plain arguments go to all",
        "`NeedParallel` of lists",
        "of tensors",
        "over replicas and ranks",
        "fewer rows than ranks",
        "columns",
        "long sequences over ranks",
        "results put together",
        "`on_weights_materialized`",
        "built without memory",
        "buffers survive that",
        "weights from a dict or a function",
        "names changed on loading",
        "adapters merged on export",
        "no optimizer where none is wanted",
        "`train()`, `eval()`",
        "gradients of several passes",
        "any `torch.nn.Module`",
        "inputs that are not text",
    ),
    "D. Dividing a model": (
        44,
        "ZeRO-3",
        "`ddp_size`",
        "one process",
        "tensor parallel",
        "log-probs of a divided vocabulary",
        "entropies of a divided vocabulary",
        "context parallel",
        "sizes that do not fit are refused",
        "one gradient norm",
        "float32 masters and sums",
        "gradient checkpointing",
        "offload of everything",
        "tensors smaller than the ranks",
    ),
    "E. Batches": (
        57,
        "balanced packing",
        "packing changes nothing",
        "a limit of length",
        "pairs stay together",
        "order is restored",
        "any number at a time",
        "several updates of one rollout",
        "rows that are too long",
    ),
    "F. Data": (
        65,
        "every file type, and splits",
        "SFT: texts",
        "SFT: conversations",
        "headers are not trained",
        "only the last answer",
        "prompts, too",
        "templates that rewrite history",
        "pairs: texts",
        "pairs: conversations",
        "prompts with `extra_info`",
        "environments without data",
        "a held-out split",
        "`EnvBase`",
        "`MathDataset`",
        "boxed answers",
        "epochs without replacement",
    ),
    "G. Rollouts and environments": (
        81,
        "answers in the prompts' order",
        "the batch changes no tokens",
        "sampling parameters",
        "tokens and log-probs",
        "the end-of-sequence token is trained",
        "`async step`",
        "turns in one sequence",
        "turns in several",
        "reward and score",
        "the end of an episode",
        "an environment that fails",
        "pools",
        "waits overlap",
        "more turns by a hook",
        "balance between rollouts",
        "partial rollouts",
        "dynamic filtering",
        "limits of rewards",
        "tensor-parallel rollouts",
    ),
    "H. Weights": (
        100,
        "from training to rollouts",
        "on one device",
        "between hosts",
        "wrong names are errors",
        "versions are verified",
        "in buckets",
        "tied tensors",
        "into a train engine",
    ),
    "I. Algorithms": (
        108,
        "SFT",
        "reward model",
        "DPO",
        "Dr. GRPO",
        "DeepSeek's GRPO",
        "groups by prompt",
        "OpenAI's PPO",
        "GAE over turns",
        "k1, k2, k3",
        "KL in reward, loss, advantage",
        "the clip",
        "correction of rollouts",
        "entropy bonus",
        "means over tokens and sequences",
        "packing and ranks change no gradient",
        "temperature",
        "on-policy distillation",
        "critic first",
        "the critic",
        "GRPO learns",
    ),
    "J. Running": (
        128,
        "evaluation every n steps",
        "of SFT by loss",
        "of SFT by sampling",
        "the evaluator",
        "the evaluator on vLLM",
        "models as Hugging Face's",
        "checkpoint and resume",
        "the latest checkpoint",
        "Weights & Biases",
        "a log on disk",
        "means over ranks",
        "completions in the log",
        "seconds by phase",
        "learning-rate schedules",
        "a choice of optimizers",
        "attention without FlashAttention",
        "Liger kernels",
        "LoRA",
        "seeds",
        "arguments are checked",
        "a debugger on a worker",
        "lint, types, wheel",
        "a worker dies",
    ),
}
"""Section to the number of its first feature, and its features in order."""

QUICKLY = "EFGIJ"
"""Sections whose features ``make test`` shows, each by a test that is not slow at least."""

ABSENT = {144: "not there: `torch.compile` makes the kernels of log-probs on a GPU; the others are the model's"}
"""Features without a test, and why."""


def features() -> dict[int, str]:
    """Number to name."""
    return {first + at: name for first, *names in SECTIONS.values() for at, name in enumerate(names)}


def shown(slow: bool = True) -> dict[int, list[str]]:
    """Number to the tests that show it, as ``folder/file.py::test``; with those marked ``slow`` or without."""
    found: dict[int, list[str]] = {}
    for test, numbers, is_slow in _tests():
        for number in numbers if slow or not is_slow else ():
            found.setdefault(number, []).append(test)
    return found


@cache
def _tests() -> list[tuple[str, tuple[int, ...], bool]]:
    """Each test, its features, and whether it is slow."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [(f"{path.relative_to(TESTS)}::{name}", *about) for path in files for name, *about in _tests_in(path)]


def _tests_in(path: Path) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_all = any(_sets_marks(node) and _says_slow(node) for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            numbers = tuple(number for decorator in node.decorator_list for number in _numbers_in(decorator))
            yield node.name, numbers, of_all or any(map(_says_slow, node.decorator_list))


def _numbers_in(decorator: ast.expr) -> tuple[int, ...]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.feature":
        return tuple(ast.literal_eval(argument) for argument in decorator.args)
    return ()


def _sets_marks(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)


def _says_slow(node: ast.AST) -> bool:
    return "pytest.mark.slow" in ast.unparse(node)


def page() -> str:
    """The page as it should be."""
    lines = [
        "---",
        "orphan: true",
        "---",
        "",
        "# What it can do, and which tests show it",
        "",
        "The features that users of RLite, RL2 and RLFusion know. A test names the features it shows in a marker:",
        "`pytest --feature 87` runs the tests of feature 87. Written by `python -m tests.feature_table`.",
    ]
    names, tests = features(), shown()
    for title, (first, *inside) in SECTIONS.items():
        lines += ["", f"## {title}", "", "| | feature | tests |", "|---|---|---|"]
        for number in range(first, first + len(inside)):
            cells = "<br>".join(f"`{test}`" for test in tests.get(number, ())) or ABSENT.get(number, "none")
            lines.append(f"| {number} | {names[number]} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    assert all(last + 1 == number for last, number in pairwise(features())), "numbers have no gaps"
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
