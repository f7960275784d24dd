# SPDX-License-Identifier: Apache-2.0
"""The limits of ``tests/shape_limits.toml`` hold, and a tree above one of them is named."""

import re
import subprocess
import sys

import pytest

from docs.generate import remove_generated
from tests.import_rules import separate_parts
from tests.shape import LIMITS, REPOSITORY, Place, Tree, changed_files, excesses, oversized, pages_of, phrases_in

SCOPES = ("dlrover", "tests", "benchmarks", "examples")


@pytest.fixture(scope="module")
def package():
    return Tree(REPOSITORY / "dlrover")


@pytest.mark.parametrize("scope", SCOPES)
def test_shape_of_the_tree_is_within_its_limits(scope, package):
    tree = package if scope == "dlrover" else Tree(REPOSITORY / scope)
    messages = excesses(tree.measure(), LIMITS[scope], changed_files(tree.root))
    assert not messages, f"{scope}:\n" + "\n".join(messages)


def long_lines_in(pages):
    """Yield the lines of prose above 120 characters; tables, code and what is generated may have them."""
    for name, text in pages.items():
        is_code = False
        for number, line in enumerate(text.split("\n"), 1):
            is_code ^= line.lstrip().startswith("```")
            if len(line) > 120 and not is_code and not line.startswith("|"):
                yield Place(name, number, line[:40])


def test_pages_are_within_their_limits():
    pages = pages_of(REPOSITORY, [*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))])
    pages = {name: remove_generated(text) for name, text in pages.items()}
    measures = {"phrases": list(phrases_in(pages)), "long_lines": list(long_lines_in(pages))}
    messages = excesses(measures, LIMITS["pages"], changed_files(REPOSITORY))
    assert not messages, "\n".join(messages)


def test_largest_functions_files_and_classes_are_within_limits(package):
    messages = oversized(package, LIMITS["largest"], LIMITS["attributes"])
    assert not messages, "\n".join(messages)


def test_files_of_a_folder_are_connected_by_imports():
    messages = unconnected(REPOSITORY / "dlrover", LIMITS["unconnected"], LIMITS["families"])
    assert not messages, "\n".join(messages)


def unconnected(root, allowed, families):
    """A message for each folder with more parts than it may have, and for each exception that is higher than needed."""
    separate = separate_parts(root)
    parts = {folder: groups for folder, groups in separate.items() if folder not in families}
    messages = []
    for folder, groups in parts.items():
        if len(groups) > allowed.get(folder, 1):
            messages.append(f"{folder}: no import connects {'; '.join(', '.join(group) for group in groups)}")
    for folder, number in allowed.items():
        if len(parts.get(folder, [[]])) < number:
            messages.append(f"[unconnected] allows {folder} {number} parts: lower it")
    idle = [folder for folder in families if folder not in separate]
    return messages + [f"[families] names {folder}, whose files are connected: remove it" for folder in idle]


def test_names_of_tests_are_short():
    names = [
        name
        for file in REPOSITORY.glob("tests/**/test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    ]
    assert not [name for name in names if len(name) > LIMITS["largest"]["test_name"]]


def test_one_step_crosses_few_modules():
    command = [sys.executable, "-m", "benchmarks.step_trace"]
    trace = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120).stdout
    count = int(re.match(r"step 2 crosses (\d+) modules", trace)[1])
    assert 1 < count <= LIMITS["step"]["modules"], trace


# -- one above a limit fails, and the file is named -------------------------------------------------------------------

ROWS = """\
from dlrover.python.rl.data.files import read


class Row:
    pass
"""
TREE = {"python/rl/data/rows.py": ROWS, "python/rl/data/files.py": "def read(path):\n    return path\n"}
"""A tree that is exactly at its limits."""

PHRASE = LIMITS["words"]["phrases"][0]
ONE_MORE = [
    ("lines", "python/rl/data/files.py", "x = 1\n"),
    ("modules", "python/rl/data/more.py", "x = 1"),
    ("functions", "python/rl/data/files.py", "x = lambda: 1; y = 2\ndef write(): ..."),
    ("classes", "python/rl/data/files.py", "class File: ..."),
    ("names_twice", "python/rl/data/files.py", "class Row: ...\n"),
    ("names_twice", "python/rl/data/files.py", "def make():\n    class Row: ...\n    return Row\n"),
    ("vague_names", "python/rl/data/files.py", "told = 1"),
    ("vague_names", "python/rl/data/files.py", "def write(*, told_=1): ..."),
    ("fragments", "python/rl/data/files.py", 'class File:\n    """Of the files."""'),
    ("phrases", "python/rl/data/files.py", f'MESSAGE = "a run {PHRASE}"'),
    ("phrases", "pages/data.md", f"A page {PHRASE}.\n"),
]


def write_tree(root, files):
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return Tree(root)


def test_excesses_at_the_limits_is_empty(tmp_path):
    tree = write_tree(tmp_path, TREE)
    measures = tree.measure()
    limits = {name: sum(place.amount for place in places) for name, places in measures.items()}
    none = dict.fromkeys(("names_twice", "vague_names", "fragments", "phrases"), 0)
    assert limits == {"lines": 7, "modules": 2, "functions": 1, "classes": 1, **none}
    assert excesses(measures, limits) == []


@pytest.mark.parametrize(("measure", "file", "addition"), ONE_MORE)
def test_excesses_one_above_a_limit_names_the_file(tmp_path, measure, file, addition):
    tree = write_tree(tmp_path, TREE)
    limits = {name: sum(place.amount for place in places) for name, places in tree.measure().items()}
    tree = write_tree(tmp_path, TREE | {file: TREE.get(file, "") + addition})
    (message,) = excesses(tree.measure(), {measure: limits[measure]})
    assert message.startswith(f"{measure}: {limits[measure] + 1}, and the limit is {limits[measure]}")
    assert file in message


def test_excesses_names_the_changed_file_before_larger_ones():
    places = [Place(f"large{file}.py", line, "told") for file in range(12) for line in range(1, 4)]
    places.append(Place("small.py", 1, "told"))
    (message,) = excesses({"vague_names": places}, {"vague_names": 36}, {"small.py"})
    _, first, *following = message.splitlines()
    assert first == "  small.py:1: told"
    assert len(following) == 9
    (unordered,) = excesses({"vague_names": places}, {"vague_names": 36})
    assert "small.py" not in unordered


def test_changed_files_are_those_of_the_last_commit(tmp_path):
    def git(*arguments):
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    assert changed_files(tmp_path) == set()
    git("init")
    for number, name in enumerate(("package/old.py", "package/new.py")):
        write_tree(tmp_path, {name: f"x = {number}\n"})
        git("add", ".")
        git("commit", "-m", "Add a file")
    assert changed_files(tmp_path / "package") == {"new.py"}


LARGEST = {"function_lines": 60, "file_lines": 600, "unexplained_file_lines": 400, "attributes": 12}
MANY = "\n".join(f"        self.a{number} = {number}" for number in range(13))
FIELDS = "\n".join(f"    a{number}: int" for number in range(13))
RECORD = f"from dataclasses import dataclass\n\n@dataclass({{}})\nclass Record:\n{FIELDS}\n"

OVERSIZED = [
    ("def f():\n" + "    x = 1\n" * 60, "a.py:1: f has 61 lines, 60 at most"),
    ("x = 1\n" * 401, "a.py: 401 lines; say why in a comment '# Over 400 lines: ...'"),
    ("# Over 400 lines: one table\n" + "x = 1\n" * 600, "a.py: 601 lines, 600 at most"),
    (f"class Big:\n    def __init__(self):\n{MANY}\n", "a.py:1: Big has 13 attributes, 12 at most"),
    (RECORD.format(""), "a.py:4: Record has 13 attributes, 12 at most"),
    (f"class Big:\n{FIELDS}\n", "a.py:1: Big has 13 attributes, 12 at most"),
    ("x = 1\n" * 401 + "# Over 400 lines: late\n", "a.py: 402 lines; say why in a comment '# Over 400 lines: ...'"),
    ("# Over 1 lines: low\n" + "x = 1\n" * 400, "a.py: 401 lines; say why in a comment '# Over 400 lines: ...'"),
]


@pytest.mark.parametrize(("source", "message"), OVERSIZED)
def test_oversized_names_the_place(tmp_path, source, message):
    assert oversized(write_tree(tmp_path, {"a.py": source}), LARGEST, {}) == [message]


AT_A_LIMIT = ["def f():\n" + "    x = 1\n" * 59, "x = 1\n" * 400, "# Over 400 lines: one table\n" + "x = 1\n" * 599]


@pytest.mark.parametrize("source", [*AT_A_LIMIT, RECORD.format("frozen=True")])
def test_oversized_at_a_limit_is_empty(tmp_path, source):
    assert oversized(write_tree(tmp_path, {"a.py": source}), LARGEST, {}) == []


def test_oversized_exception_can_only_fall(tmp_path):
    tree = write_tree(tmp_path, {"a.py": f"class Big:\n    def __init__(self):\n{MANY}\n"})
    assert oversized(tree, LARGEST, {"Big": 13}) == []
    assert oversized(tree, LARGEST, {"Big": 14}) == ["[attributes] allows Big 14 attributes, and it has 13: lower it"]


def test_unconnected_folder_is_named_with_its_parts(tmp_path):
    write_tree(tmp_path, TREE)
    assert unconnected(tmp_path, {}, {}) == []
    write_tree(tmp_path, {"python/rl/data/curve.py": "import math\n"})
    assert unconnected(tmp_path, {}, {}) == ["data: no import connects curve; files, rows"]
    assert unconnected(tmp_path, {"data": 2}, {}) == []
    assert unconnected(tmp_path, {"data": 3}, {}) == ["[unconnected] allows data 3 parts: lower it"]
    assert unconnected(tmp_path, {}, {"data": "one file per kind"}) == []
    write_tree(tmp_path, {"python/rl/data/curve.py": "import dlrover.python.rl.data.files\n"})
    idle = "[families] names data, whose files are connected: remove it"
    assert unconnected(tmp_path, {}, {"data": "one file per kind"}) == [idle]


def test_unconnected_counts_a_sub_folder_as_one_module(tmp_path):
    text = "import dlrover.python.rl.data.readers.csv\n"
    files = {"rows.py": text, "readers/csv.py": "", "readers/json.py": text}
    write_tree(tmp_path, {f"python/rl/data/{name}": source for name, source in files.items()})
    assert unconnected(tmp_path, {}, {}) == []
