# SPDX-License-Identifier: Apache-2.0
"""Every example and every command of the README and the guides runs as its page shows it, and the site is built."""

import asyncio
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common import errors
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job, load_job_text
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.messages import make_assistant_message
from docs.generate import remove_generated
from tests.support import commands
from tests.support.commands import ROOT, run_python

DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
PAGES = [*GUIDES, *sorted(DOCS.glob("*.md"))]
LANGUAGES = ("python", "yaml", "bash", "json")
ELSEWHERE = ("python.md", "service.md")
"""Pages whose Python is run by other tests; so are ``shell`` blocks, which need a service."""
MODELS = ("runs/tiny", "runs/teacher")
"""Made by the first commands of a page, for the others."""
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One line of a bash block, and the exit code that the page promises."""

    line: str
    code: int

    @property
    def on_ray(self) -> bool:
        return "from_dlrover" in self.line or ("dlrover-rl run" in self.line and "--local" not in self.line)

    @property
    def trains_a_model(self) -> bool:
        names = ("recipe.tiny", "runs/tiny", "own_data", "own_algorithm", "guides/agents/")
        return any(name in self.line for name in names)

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        marks = [pytest.mark.ray] if self.on_ray else []
        marks += [pytest.mark.needs("openai")] if "guides/agents/" in self.line else []
        shown_elsewhere = self.code != 0 or "fault_tolerance" in self.line
        return [*marks, pytest.mark.slow] if self.on_ray or self.trains_a_model or shown_elsewhere else marks

    @property
    def typed(self) -> str:
        """The lines to type into the debugger, if it opens."""
        return "p self.rank, texts\nup\nc\nc\n" if "debug_locally" in self.line and " check " not in self.line else ""


def blocks(pages: list[Path]) -> list[Block]:
    """Blocks of the pages, without files of code, which have their own tests."""
    fence = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(page.name, language, text)
        for page in pages
        for language, text in fence.findall(remove_generated(page.read_text(encoding="utf-8")))
    ]


def bash_lines(pages: list[Path]) -> list[tuple[str, str]]:
    """The commands of the pages, and the comment behind each."""
    lines = [line.split("#") for block in blocks(pages) if block.language == "bash" for line in block.text.splitlines()]
    return [(line.strip(), "".join(comment)) for line, *comment in lines if line.strip()]


def guide_commands() -> list[Command]:
    codes = [(line, re.search(r"exit code (\d+)", comment)) for line, comment in bash_lines(GUIDES)]
    return [Command(line, int(code[1]) if code else 0) for line, code in codes]


def texts_after(words: str) -> list[str]:
    """The ``text`` blocks of the guides that hold ``words``."""
    return [block.text for block in blocks(GUIDES) if block.language == "text" and words in block.text]


@pytest.fixture
def desk(tmp_path):
    """A working directory that looks like the repository's, with ``dlrover-rl`` and ``python`` on the path."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("from_dlrover", "own_algorithm", "own_data"):
        shutil.copytree(DOCS / "guides" / folder, tmp_path / "docs" / "guides" / folder)
    for name, module in (("dlrover-rl", "-m dlrover.python.rl.cli"), ("python", "")):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        path = f'PYTHONPATH="$PYTHONPATH:{ROOT}"'
        script.write_text(f'#!/bin/sh\n{path} exec "{sys.executable}" {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return tmp_path


def run(desk, line, typed="", code=0, **env):
    """Run a shell line at the desk, which must end with this exit code; None: with any."""
    env = {"PATH": f"{desk / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
    return commands.run(desk, "bash", "-c", line, typed=typed, code=code, within_s=DEADLINE_S, **env)


def run_script(desk, text, **env):
    (desk / "script.py").write_text(text, encoding="utf-8")
    return run(desk, "python script.py", **env).stdout


def block_with(words, pages=GUIDES, language="python"):
    """Return the one block that holds ``words``."""
    (text,) = [block.text for block in blocks(pages) if block.language == language and words in block.text]
    return text


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_first_trainer_finds_the_best_lever(desk):
    done = run(desk, "dlrover-rl run examples/first_trainer/job.yaml --local")
    learnt = read(desk / "runs/first-trainer/latest/policy.json")
    assert learnt["policy"][1] > 0.9
    first = float(re.search(r"step 1/60 +reward ([\d.]+)", done.stderr)[1])
    assert first < 0.6 < 0.7 < learnt["reward"]
    assert [learnt] == [json.loads(block.text) for block in blocks(GUIDES) if block.language == "json"]


ALIKE = [[f"--local workload.rollout.num={members}" for members in (1, 3, 8)], ["--local", ""]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [ALIKE[0], pytest.param(ALIKE[1], marks=pytest.mark.ray)], ids=["sizes", "Ray"])
def test_first_trainer_learns_the_same_in_any_way(desk, options):
    for number, option in enumerate(options):
        line = f"dlrover-rl run examples/first_trainer/job.yaml trainer.device_per_node=9 job_dir=runs/{number}"
        run(desk, f"{line} {option}")
        assert read(desk / f"runs/{number}/policy.json") == read(desk / "runs/0/policy.json")


@pytest.mark.feature(148)
def test_breakpoint_stops_in_the_worker_with_the_empty_text(desk):
    done = run(desk, "dlrover-rl run examples/debug_locally/job.yaml --local", "p self.rank, texts\nc\nc\n")
    assert "(1, ['', 'eleven'])" in done.stdout
    assert any("(1, ['', 'eleven'])" in text for text in texts_after("(Pdb) p self.rank"))
    assert read(desk / "runs/debug-locally/latest/total.json") == {"total": 28.0, "texts": 4}


@pytest.mark.slow
def test_leaving_the_debugger_fails_the_job(desk):
    assert "BdbQuit" in run(desk, "dlrover-rl run examples/debug_locally/job.yaml --local", "q\n", code=1).stderr


@pytest.mark.slow
def test_debugger_shows_its_prompt_on_a_terminal(desk):
    """Run with the progress bar sent elsewhere, as the page says."""
    ours, child_end = pty.openpty()
    line = f"{desk}/bin/dlrover-rl run examples/debug_locally/job.yaml --local 2> run.log"
    child = subprocess.Popen(["bash", "-c", line], cwd=desk, stdin=child_end, stdout=child_end, start_new_session=True)
    os.close(child_end)
    try:
        seen = []
        for answer in (b"p self.rank\n", b"c\n", b"c\n"):
            seen.append(_until(ours, b"(Pdb) "))
            os.write(ours, answer)
        assert b"\r\n1\r\n(Pdb) " in seen[1]
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def _until(terminal: int, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        ready, _, _ = select.select([terminal], [], [], DEADLINE_S)
        assert ready, f"nothing more than {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.slow
def test_launch_file_runs_the_example(desk):
    (entry,) = read(desk / "examples/debug_locally/launch.json")["configurations"]
    line = " ".join(["python", "-m", entry["module"], *entry["args"]])
    done = run(desk, line, PYTHONBREAKPOINT="0")
    assert "Pdb" not in done.stdout


def test_guides_have_commands_and_code():
    languages = [block.language for block in blocks(GUIDES)]
    assert len(GUIDES) >= 3
    assert len(guide_commands()) >= 40
    assert sum(block.language == "python" for block in blocks(GUIDES) if block.page not in ELSEWHERE) == 6
    assert set(languages) <= {*LANGUAGES, "text", "shell"}


@pytest.mark.parametrize("command", [pytest.param(item, marks=item.marks, id=item.line) for item in guide_commands()])
def test_command_ends_as_its_page_says(desk, command):
    for seed, model in enumerate(MODELS if command.trains_a_model else ()):
        if model == MODELS[0] or model in command.line:
            run(desk, f"python -m dlrover.python.rl.recipe.tiny --out {model} --seed {seed}")
    run(desk, command.line, command.typed, command.code)


SLOW_ERRORS = [
    ("check examples/first_trainer/job.yaml workload.rollout.num=4", "impossible placement"),
    ("check examples/first_trainer/job.yaml stepz=5", "unknown key 'stepz'"),
    ("run examples/first_trainer/job.yaml --local lr=fast", "user_error is not retried"),
    ("check examples/debug_locally/job.yaml --local workload.actor.num=2", "meet in collectives"),
    ("check docs/guides/own_data/grpo.yaml data.train=docs/guides/own_data/broken.jsonl", "unknown key 'promt'"),
]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("check examples/first_trainer/job.yaml payouts=[2] workload.rollout.class=Rolout", "config.payouts"),
        ("run examples/first_trainer/job.yaml --local pulls_per_step=1", "too few to split"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_ERRORS),
    ],
)
def test_errors_read_as_their_page_shows(desk, line, words):
    (shown,) = texts_after(words)
    if "own_data" in line:
        run(desk, "python -m dlrover.python.rl.recipe.tiny --out runs/tiny")
    printed = run(desk, f"dlrover-rl {line}", code=None).stderr
    # The host's name is another one elsewhere.
    for expected in shown.splitlines():
        assert re.sub(r" on \S+:", " on HOST:", expected) in re.sub(r" on \S+:", " on HOST:", printed)


def test_lines_about_pending_results_run(desk):
    code = f"""
        import json
        from dlrover.rl import Replicate, Shard
        from trainer import BanditTrainer

        class Shown(BanditTrainer):
            def fit(self):
                step = 1
                (policy,) = self.RG_ACTOR.policy()
                {textwrap.indent(block_with("pulls.result"), " " * 16).strip()}
                (self.job_dir / "shown.json").write_text(json.dumps([reward, [len(part) for part in parts]]))
    """
    (desk / "examples/first_trainer/shown.py").write_text(textwrap.dedent(code), encoding="utf-8")
    overrides = "trainer.module=shown trainer.class=Shown job_dir=runs/shown"
    run(desk, f"dlrover-rl run examples/first_trainer/job.yaml --local {overrides}")
    assert read(desk / "runs/shown/shown.json") == [0.40625, [32, 32]]


def test_environment_of_messages_answers_them(desk):
    (desk / "user.py").write_text(block_with("class User"), encoding="utf-8")
    environment = load_environment(f"{desk / 'user.py'}:User")
    observation = asyncio.run(environment.reset({}))
    messages = [make_assistant_message(text) for text in ("52?", "It is 51.")]
    unsure, sure = (asyncio.run(environment.step(observation, message, {})) for message in messages)
    assert unsure.next_state == [{"role": "user", "content": "Are you sure?"}] and sure.done
    assert set(environment.traits.chat_template_kwargs) == {"tools", "enable_thinking"}


SCRIPTS = {
    "run_here": "finished the trainer returned\n",
    "PullTransport": "True tensor([1., 1., 1., 1.])\n",
    "make_algorithm": "",
}
"""Words of a script in a guide to what it prints."""


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=[pytest.mark.slow] * (words != "run_here")) for words in SCRIPTS]
)
def test_script_of_a_guide_prints_its_result(desk, words):
    printed = run_script(desk, block_with(words), PYTHONBREAKPOINT="0")
    assert not SCRIPTS[words] or printed == SCRIPTS[words]


def test_job_files_of_the_reference_are_jobs():
    reference = [block for block in blocks(PAGES) if block.page == "job-file.md"]
    short, whole, group = [block.text for block in reference if block.language == "yaml"]
    assert [spec.num for spec in load_job_text(short, "shown").workloads.values()] == [8, 8, 1]
    job = load_job_text(whole, "shown")
    assert list(job.workloads) == ["ACTOR"]
    roles = "workload: {actor: {module: m, class: C}, reference: {module: m, class: C}}\n"
    assert load_job_text(f"trainer: {{module: m, class: C}}\n{roles}{group}", "shown").groups
    assert OmegaConf.create(group)


def test_builder_of_the_reference_runs(desk):
    package = desk / "my_package"
    package.mkdir()
    workloads = "class MyActor(BaseWorkload): pass\nclass MyRollout(BaseWorkload): pass\n"
    (package / "workloads.py").write_text(f"from dlrover.rl import BaseWorkload\n{workloads}")
    methods = "    def init(self): pass\n    def fit(self): print(self.get_role_groups(), self.config.lr)\n"
    text = f"from dlrover.rl import BaseTrainer\nclass MyTrainer(BaseTrainer):\n{methods}"
    (package / "trainer.py").write_text(text)
    script = block_with("", [DOCS / "job-file.md"])
    assert run_script(desk, script) == "['RG_ACTOR', 'RG_ROLLOUT'] 0.001\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages."""
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("html")
    options = ["-W", "--keep-going", "-q", "-d", out / "trees", "-b", "html"]
    run_python(ROOT, "-m", "sphinx", *options, DOCS, out / "html", within_s=280)
    return out / "html"


@pytest.mark.slow
def test_built_page_of_keys_has_them(site):
    page = (site / "job-file.html").read_text(encoding="utf-8")
    for key in ("node_number", "device_per_node", "per_node", "resource", "workload_max_restart", "backoff_s"):
        assert f'<span class="pre">{key}</span>' in page


@pytest.mark.slow
def test_built_contract_names_every_error(site):
    page = (site / "contract.html").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 18
    assert [kind.__name__ for kind in kinds if kind.__name__ not in page] == []


README = [ROOT / "README.md"]
COMMANDS = [line for line, _ in bash_lines(README)]


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory):
    """A folder with the README's files."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "hello.py").write_text(block_with("", README))
    (folder / "hello.yaml").write_text(block_with("", README, "yaml"))
    return folder


def test_readme_has_no_setting_hidden_as_a_secret(readme_folder):
    job = load_job(readme_folder / "hello.yaml")
    assert job_to_yaml(job, hide_secrets=True) == job_to_yaml(job)


def test_readme_trainer_and_workload_have_forty_lines():
    assert len(block_with("", README).splitlines()) <= 40


def test_readme_commands_are_run_somewhere():
    assert COMMANDS == [
        "make demo",  # tests/slow/test_learning.py runs what it runs
        "make test",  # this run
        "source .venv/bin/activate",
        "dlrover-rl init my-job && cd my-job",  # tests/unit/deploy/test_deploy_files.py runs these
        "python -m dlrover.python.rl.recipe.tiny --out tiny-model",
        "dlrover-rl check job.yaml",
        "dlrover-rl run job.yaml --local steps=2",
        "dlrover-rl run job.yaml",
        "dlrover-rl check hello.yaml",
        "dlrover-rl run hello.yaml --local",
        "dlrover-rl run hello.yaml target=77",
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (COMMANDS[8], "REFEREE    x2  hello.Referee"),
        (COMMANDS[9], "hello: finished"),
        pytest.param(COMMANDS[10], "hello: finished", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_readme_command_checks_or_runs_its_trainer(readme_folder, command, words):
    done = run_python(readme_folder, "-m", "dlrover.python.rl.master.main", *command.split()[1:])
    assert words in done.stdout + done.stderr
