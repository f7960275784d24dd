# SPDX-License-Identifier: Apache-2.0
"""The verbs for looking at runs, on the folder of a run, and ``trace`` on a run in one process."""

import getpass
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.commands import cli
from dlrover.python.rl.page import serve
from dlrover.python.rl.page.spans import read_steps
from tests.support.recorded_spans import Recording
from tests.support.run_folder import BEGAN_S, write_description, write_owner, write_run
from tests.unit.cli.test_cli import shell, write  # noqa: F401 -- a fixture

pytestmark = pytest.mark.usefixtures("kept_logger")


@pytest.fixture
def run_verb(tmp_path):
    folder = write_run(tmp_path / "toy", steps=6, lost_at=2)

    def run(verb, *options):
        result = CliRunner().invoke(cli, [verb, str(folder), *options])
        error = "" if result.exception is None or result.exit_code != 1 else str(result.exception)
        return result.stdout, error

    return run


@pytest.mark.parametrize(
    ("verb", "options", "shown"),
    [
        ("samples", (), "prompt 1 sample 1: reward 3, advantage 1.5, version 5, rank 1, reward/exact 3"),
        ("samples", ("--step", "2", "--best", "1"), "completion: <script>alert(3)</script> answer 3"),
        ("samples", ("--errors",), "prompt 0 sample 1: reward 1, advantage -0.5, version 5, rank 1, reward/exact 1"),
        ("samples", ("--errors",), "  failed: "),
        ("lineage", ("--step", "4"), "prompt id"),
        ("events", ("--grep", "killed"), "--- ROLLOUT[1]: process_died: killed by signal 9"),
        ("events", ("trainer",), "2027-01-15 08:00:05 trainer      08:00:05 W <b>slow</b> red"),
        ("explain", ("--time",), "recovery (process_died)                 3.0 s"),
        ("explain", ("--time",), "ROLLOUT[1]: process_died: killed by signal 9 (step 2, 3.0 s)"),
    ],
)
def test_look_verb_prints_the_run(run_verb, verb, options, shown):
    output, error = run_verb(verb, *options)
    assert (shown in output, error) == (True, "")


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        (("--worst", "2"), [0.0, 1.0]),
        (("--best", "1"), [3.0]),
        (("--prompt", "1"), [2.0, 3.0]),
        (("--grep", "ANSWER 2"), [2.0]),
        (("--errors",), [1.0]),
    ],
)
def test_samples_chooses_rows(run_verb, options, rewards):
    output, _ = run_verb("samples", "--step", "3", *options, "--json")
    assert [row["reward"] for row in json.loads(output)] == rewards


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("samples", ("--worst", "2", "--best", "2"), "--worst, --best: cannot be used together"),
        ("samples", ("--step", "7"), "--step: 7 has no samples: there are steps 1 to 6"),
        ("lineage", ("--step", "7", "--json"), "no sample that step 7 trained on: there are samples of steps 1 to 6"),
        ("samples", ("--prompt", "9"), "--prompt: step 6 has no prompt '9'; known: 0, 1"),
        ("stacks", (), "has no running process in its journal"),
        ("events", ("trainr",), "'trainr' has no log; did you mean 'trainer'?"),
    ],
)
def test_look_verb_refuses_a_step_that_is_missing(run_verb, verb, options, message):
    assert message in run_verb(verb, *options)[1]


def test_stacks_of_a_process_elsewhere_name_its_command(tmp_path):
    folder = str(write_run(tmp_path / "toy", steps=1, lost_at=0, ended=False))
    (row,) = json.loads(CliRunner().invoke(cli, ["stacks", folder, "rollout-1", "--json"]).stdout)
    assert list(row.values()) == ["ROLLOUT[1]", 102, "host-b", "run 'py-spy dump --pid 102' there"]


def test_explain_prints_the_state_and_the_past_as_json(run_verb):
    output, _ = run_verb("explain", "--json")
    state = json.loads(output)
    assert (state["phase"], state["step"], state["ended"]) == ("finished", 6, True)
    assert (state["total_steps"], state["step_s"], state["last_step_s"] > 0) == (6, 2.0, True)
    assert [each["message"] for each in state["failures"]] == ["ROLLOUT[1]: process_died: killed by signal 9"]
    seconds = {(each["use"], each["cause"]): each["seconds"] for each in state["uses"]}
    assert seconds["recovery", "process_died"] == pytest.approx(3.0)
    (mark,) = state["marks"]
    assert (mark["kind"], mark["process"], mark["step"]) == ("recovery", "ROLLOUT[1]", 2)
    assert (state["findings"], state["try"]) == ([], [])


def test_runs_lists_the_runs_below_a_folder(tmp_path):
    write_run(tmp_path / "a/toy", steps=6, lost_at=2)
    result = CliRunner().invoke(cli, ["runs", str(tmp_path), "--json"])
    (row,) = json.loads(result.stdout)
    assert (row["id"], row["phase"], row["step"], row["recoveries"]) == ("a/toy", "finished", 6, 1)
    assert row["owner"] == "ada"
    assert "a/toy" in CliRunner().invoke(cli, ["runs", str(tmp_path)]).stdout


def test_folders_without_runs_or_logs_are_named(tmp_path):
    young, empty = tmp_path / "young", tmp_path / "young/empty"
    empty.mkdir(parents=True)
    write_owner(young, BEGAN_S, "running")
    write_description(young)
    for line, message in (
        (f"runs {empty}", f"no runs in or below {empty}\n"),
        (f"view {empty} --export x.html", "/empty: neither the folder of a run nor a name under "),
        (f"samples {young}", "young: has no samples: log.samples may be off, the recipe may have none, or"),
        (f"events {young} actor-0", "'actor-0' has no log: a run in one process writes none, "),
    ):
        result = CliRunner().invoke(cli, line.split())
        assert message in f"{result.stdout}{result.exception}"


@pytest.mark.parametrize("folders", [["toy"], ["a/toy/one", "b/toy/one"]], ids=["name", "same names"])
def test_view_serves_every_run_of_its_folders(tmp_path, monkeypatch, folders):
    for each in ("toy/one", "toy/two", "a/toy/one", "b/toy/one"):
        write_run(tmp_path / each, steps=1, lost_at=0)
    (tmp_path / "toy/latest").symlink_to("two")
    monkeypatch.setattr(serve, "serve", lambda app, listener: None)
    result = CliRunner().invoke(cli, ["view", "--port", "0", *(str(tmp_path / each) for each in folders)])
    assert "/  2 runs; Ctrl-C" in result.output


def test_view_exports_a_run_as_one_file(run_verb, tmp_path):
    output, _ = run_verb("view", "--export", str(tmp_path / "run.html"))
    assert "open it in a browser" in output
    assert 'id="answers"' in (tmp_path / "run.html").read_text()
    assert "is beyond loopback" in run_verb("view", "--host", "0.0.0.0")[1]


def test_reference_names_every_verb():
    page = (Path(__file__).parents[3] / "docs/reference/cli.md").read_text()
    assert [name for name in cli.list_commands(None) if not re.search(f"`(dlrover-rl )?{name}[` ]", page)] == []


# -- traces of a run in one process ------------------------------------------------------------------------------------


@pytest.fixture
def ran(shell):  # noqa: F811 -- the fixture
    """Run a job of three steps in ``out``, and return the shell."""
    assert shell("run", write(), "--local", "job_dir=out")[0] == 0
    return shell


def test_trace_of_a_local_run_is_written(ran):
    code, out, _ = ran("trace", "out", "--steps", "2:3")
    assert (code, out.split(":")[0]) == (0, "steps-2-3.pftrace")
    assert b"ACTOR[1]" in Path("steps-2-3.pftrace").read_bytes()
    assert ran("trace", "out", "-o", "last")[0] == 0 and b"step 1" in Path("last").read_bytes()
    assert json.loads(Path("out/owner.1.json").read_text())["user"] == getpass.getuser()


def test_local_workers_wait_behind_each_other(ran):
    (step,) = read_steps(Path("out"), 2, 2)
    labels = {lane.process: [span.label for span in lane.spans if span.kind == "call"] for lane in step.lanes}
    assert labels["ACTOR[0]"] == labels["ACTOR[1]"] == ["add", "commit"]
    assert "behind ACTOR.add" in [span.label for lane in step.lanes[1:] for span in lane.spans]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("out --steps 9", "--steps: there are no spans of steps 9 to 9; the last step with spans is"),
        ("out --steps 3:1", "--steps: must be FIRST:LAST, such as 10:12, got '3:1'"),
        ("out --steps last", "--steps: must be FIRST:LAST, such as 10:12, got 'last'"),
        ("out -o missing/file", "missing/file cannot be written: No such file or directory"),
        ("aut", "did you mean 'out'?"),
    ],
)
def test_trace_of_wrong_arguments_is_refused(ran, arguments, message):
    code, _, err = ran("trace", *arguments.split())
    assert code == 2 and message in err


@pytest.mark.parametrize("steps", [[], ["--steps", "2:3"]], ids=["last", "named"])
def test_trace_without_spans_says_why(shell, steps):  # noqa: F811 -- the fixture
    assert shell("run", write(), "--local", "job_dir=out", "spans_mb=0")[0] == 0
    assert not Path("out/spans").exists()
    code, _, err = shell("trace", "out", *steps)
    assert code == 2 and "out: has no spans: it ran with spans_mb: 0" in err and " to " not in err


def test_explain_names_what_made_steps_slow(ran):
    assert "What made the last steps slow" not in ran("explain", "out")[1]
    recording = Recording(Path("out"))
    for number in range(1, 5):
        recording.step(number, [0.4, 1.4])
    recording.write()
    assert "What made the last steps slow:\n  ROLLOUT[1].sample took 1.4 s, its peers" in ran("explain", "out")[1]
    (finding,) = json.loads(ran("explain", "out", "--json")[1])["findings"]
    assert (finding["kind"], finding["process"]) == ("slow_rank", "ROLLOUT[1]")
