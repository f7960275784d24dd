# SPDX-License-Identifier: Apache-2.0
"""The data of the page, from folders of runs."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.log import log_line
from dlrover.python.rl.control import events
from dlrover.python.rl.page import curves, samples
from dlrover.python.rl.page.export import export
from dlrover.python.rl.page.run_data import RunFolders, RunView, find_runs
from dlrover.python.rl.page.timeline import read_timeline, use_lines
from tests.support import control_runs
from tests.support.recorded_spans import Recording, lose_rollout
from tests.support.run_files import write_rows
from tests.support.run_folder import BEGAN_S, STEP_S, append_events, metrics_of, sample_of, write_description, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "toy")


@pytest.fixture
def run(folder):
    return RunView(folder, "toy")


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_file_reads_added_rows_and_no_torn_line(folder):
    file = curves.MetricsFile(folder / "metrics.jsonl")
    assert [row["step"] for row in file.rows()] == list(range(1, 21))
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 21, "loss": 1.0}\n{"step": 22, "lo')
        lines.flush()
        assert [row["step"] for row in file.rows()][-2:] == [20, 21]
        lines.write('ss": 1.0}\n')
    assert file.rows()[-1] == {"step": 22, "loss": 1.0}


def test_damaged_line_of_metrics_hides_no_other(folder):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:5], b'{"step": 5, "lo\n', *lines[5:], b"7\n"]))
    assert [row["step"] for row in curves.MetricsFile(folder / "metrics.jsonl").rows()] == list(range(1, 21))


def test_metrics_file_reads_a_cut_file_again(folder):
    path = folder / "metrics.jsonl"
    file = curves.MetricsFile(path)
    file.rows()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]) + "".join(json.dumps({"step": step, "loss": 9.0}) + "\n" for step in (11, 12)))
    assert [row["loss"] for row in file.rows()[-2:]] == [9.0, 9.0]
    assert len(file.rows()) == 12


def test_metrics_file_is_read_once_by_several_threads(folder, monkeypatch):
    first, both = threading.Event(), curves.MetricsFile(folder / "metrics.jsonl")
    parse = curves.parse_rows

    def parse_slowly(lines):
        first.set()
        threading.Event().wait(0.02)
        return parse(lines)

    monkeypatch.setattr(curves, "parse_rows", parse_slowly)
    with ThreadPoolExecutor(2) as threads:
        rows = threads.submit(both.rows)
        first.wait()
        assert len(both.rows()) == len(rows.result()) == 20


def test_answers_equal_the_file_for_random_steps_and_metrics(tmp_path):
    """Read them also where 3000 steps are thinned to 400."""
    random_ = random.Random(56)
    folder = write_run(tmp_path / "toy", steps=1, lost_at=0)
    names = ["loss", "reward/mean", "time/step", "time/a", "time/b", "kl"]
    rows = [
        {"step": step, **{name: random_.uniform(-9, 9) for name in names}, "time/step": random_.uniform(20, 30)}
        for step in range(1, 3001)
    ]
    write_rows(folder / "metrics.jsonl", rows)
    run = RunView(folder, "toy")
    thinned, whole = (run.curves(names, points) for points in (400, 5000))
    assert (len(thinned["step"]) < 500, whole["step"]) == (True, [row["step"] for row in rows])
    for answer in (thinned, whole):
        for step, name in ((random_.choice(answer["step"]), random_.choice(names)) for _ in range(20)):
            value = rows[step - 1][name]
            assert answer["series"][name][answer["step"].index(step)] == value
            assert run.step(step)["metrics"][name] == value
    for row in rows[::10]:
        total_s, parts = curves.parts_of(row)
        assert sum(part["seconds"] for part in parts) == pytest.approx(total_s) == pytest.approx(row["time/step"])


def test_curves_of_many_steps_keep_peaks_and_ends():
    rows = [{"step": step, "loss": 1.0, "lr": step} for step in range(10_000)]
    rows[4321]["loss"] = 50.0
    thinned = curves.series_of(rows, ["loss", "lr"], 500)
    assert len(thinned["step"]) <= 500
    assert max(thinned["series"]["loss"]) == 50.0
    assert (thinned["step"][0], thinned["step"][-1]) == (0, 9999)


def test_curves_equal_the_file_and_nulls_stay(run):
    answer = run.curves(["loss", "grad_norm"], 1000)
    assert answer["series"]["loss"] == [metrics_of(step)["loss"] for step in answer["step"]]
    assert answer["series"]["grad_norm"][2] is None


def test_step_parts_add_up_to_the_step(run):
    answer = run.step(5)
    assert answer["total_s"] == STEP_S
    assert sum(part["seconds"] for part in answer["parts"]) == pytest.approx(STEP_S)
    with pytest.raises(CallError, match="step 99 has neither metrics nor spans: the last step with metrics is 20"):
        run.step(99)


def test_wait_for_a_replacement_is_a_part_of_its_own(folder, run):
    recording = Recording(folder)
    recording.lines["trainer"][-3][3] = lose_rollout(recording, 5) + 0.2  # the trainer's wait begins later
    recording.write()
    parts = {part["name"]: pytest.approx(part["seconds"]) for part in run.step(5)["parts"]}
    assert parts == {"generation": 1.2, "update": 0.5, "recovery": 0.2, "trainer": 0.1}


def test_unfinished_step_has_lanes_and_no_parts(folder, run):
    recording = Recording(folder).step(20)
    recording.add("trainer", "issue", 21, 0, "ROLLOUT", [0, 1], "sample", recording.now_s + 0.5, [])
    recording.write()
    ended, answer = run.step(20), run.step(21)
    assert (answer["parts"], answer["metrics"], answer["total_s"], len(answer["lanes"])) == ([], {}, 0.5, 4)
    assert [(each["is_unfinished"], each["last"]) for each in (ended, answer)] == [(False, 21), (True, 21)]
    assert '"api/step?id=.&step=21"' in export(folder)


# -- journals ---------------------------------------------------------------------------------------------------------


def test_timeline_marks_a_recovery_with_its_cost_and_step(run):
    (mark,) = run.marks()["marks"]
    assert (mark["kind"], mark["process"], mark["cause"]) == ("recovery", "ROLLOUT[1]", "process_died")
    assert mark["cost_s"] == pytest.approx(3.0)
    assert mark["step"] == 7


def test_timeline_of_a_loss_without_progress_is_under_way(tmp_path):
    folder = write_run(tmp_path / "other", steps=6, cost_s=None, ended=False)
    run = RunView(folder, "other")
    (mark,) = run.marks()["marks"]
    assert mark["cost_s"] is None
    assert mark["step"] >= 6
    assert run.row()["recoveries"] == 1
    assert run.overview()["try"][0].startswith("See its log")


def test_timeline_marks_a_resize_with_its_cost_and_step(tmp_path):
    recorded = [control_runs.TERMS, *control_runs.OPEN, events.Resized("ROLLOUT", 3), events.Resized("ROLLOUT", 3)]
    append_events(tmp_path, BEGAN_S, enumerate([*recorded, events.Progressed(2, 5)]))
    timeline = read_timeline(tmp_path)
    (mark,) = timeline.marks
    assert (mark.kind, mark.process, mark.cost_s, mark.step) == ("resize", "ROLLOUT", 2.0, 5)
    assert [(use.use, use.end_s - use.begin_s) for use in timeline.uses[-2:-1]] == [("resize", 2.0)]
    assert [text for _, _, text in timeline.entries].count("ROLLOUT gets 3 workers") == 1
    assert RunView(tmp_path, "resized").row()["recoveries"] == 0
    (line,) = [line for line in use_lines(tmp_path) if "gets 3 workers" in line]
    assert line.endswith("ROLLOUT: resize: ROLLOUT gets 3 workers (step 5, 2.0 s)")


def test_timeline_uses_fill_the_run_without_gaps(folder):
    uses = read_timeline(folder).uses
    assert [use.use for use in uses] == ["start", "useful", "recovery", "useful", "ending"]
    assert uses[0].begin_s == BEGAN_S
    assert all(before.end_s == after.begin_s for before, after in zip(uses, uses[1:], strict=False))


def test_timeline_of_a_resumed_run_has_both_journals(folder, tmp_path):
    other = write_run(tmp_path / "again", lost_at=0)
    (folder / "journal.jsonl").rename(folder / "journal.1.jsonl")
    (other / "journal.jsonl").rename(folder / "journal.jsonl")
    assert [mark.kind for mark in read_timeline(folder).marks] == ["recovery", "resume"]


@pytest.mark.parametrize(("old", "new"), [(b"rl-journal 1", b"rl-journal 9"), (b"ROLLOUT", b"ROLLING")])
def test_damaged_journal_is_named_beside_the_rest_of_the_run(folder, old, new):
    journal = folder / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(old, new))
    run = RunView(folder, "toy")
    row, marks = run.row(), run.marks()
    assert (row["step"], row["recoveries"], row["phase"], marks["marks"]) == (20, None, "finished", [])
    assert row["reason"] == run.overview()["journal_error"] == marks["journal_error"] != ""


# -- the list and the overview ----------------------------------------------------------------------------------------


def test_overview_names_workers_devices_and_settings(run):
    overview = run.overview()
    assert [(each["process"], each["devices"], each["state"]) for each in overview["members"]][:2] == [
        ("ACTOR[0]", "", "ended"),
        ("ROLLOUT[0]", "", "ended"),
    ]
    assert overview["settings"]["config.lr"] == 0.001
    assert overview["total_steps"] == 20
    assert 0.8 < overview["goodput"] < 1.0
    assert {each["use"] for each in overview["uses"]} == {"start", "useful", "recovery", "ending"}


def test_live_heartbeats_are_shown_while_they_are_fresh(tmp_path):
    folder = write_run(tmp_path / "toy", ended=False)
    run = RunView(folder, "toy")
    processes = {"ROLLOUT[0]": [1.0, "generate", 4.0]}
    for age_s, call in ((1.0, "generate"), (100.0, None)):
        (folder / "live.json").write_text(json.dumps({"at_s": time.time() - age_s, "processes": processes}))
        shown = {each["process"]: each for each in run.members()}
        assert shown["ROLLOUT[0]"]["call"] == call
        assert shown["ROLLOUT[0]"]["state"] == "up"


def test_runs_are_found_below_a_folder_but_not_through_links(tmp_path):
    write_run(tmp_path / "a/one")
    write_run(tmp_path / "two")
    (tmp_path / "a/latest").symlink_to("one")
    write_description(tmp_path / "a")  # of a job whose runs are below it
    assert set(find_runs(tmp_path)) == {"a/one", "two"}
    runs = RunFolders([tmp_path])
    assert {row["id"] for row in runs.rows()} == {"a/one", "two"}
    with pytest.raises(CallError, match=r"there is no run 'tow'; did you mean 'two'\?"):
        runs.get("tow")


def test_diff_lists_settings_that_differ(tmp_path):
    write_run(tmp_path / "one", steps=5)
    write_run(tmp_path / "two", steps=6)
    differing = RunFolders([tmp_path]).diff(["one", "two"])["settings"]
    assert {each["key"]: each["values"] for each in differing} == {"config.steps": [5, 6], "name": ["one", "two"]}


# -- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("step", [1, 2, 150, 299, 300])
def test_samples_of_a_step_are_found_by_bisection(tmp_path, step, parts):
    folder = write_run(tmp_path / "toy", steps=300, samples=6)
    if not parts:  # as runs before there were parts
        files = sorted((folder / "samples").iterdir())
        newest = folder / "samples.jsonl"
        newest.write_bytes(b"".join(file.read_bytes() for file in (*files, newest)))
        for file in files:
            file.unlink()
    assert samples.read_samples(folder, step) == [sample_of(step, number) for number in range(6)]
    assert samples.sample_steps(folder) == (1, 300)
    assert samples.read_samples(folder, 301) == samples.read_samples(folder, 0) == []


def test_samples_of_a_repeated_step_are_those_before(folder):
    part = folder / "samples.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[: 4 * 18]))
    part.with_name("samples.superseded.jsonl").write_text("".join(lines[4 * 18 :]))
    assert samples.read_samples(folder, 20) == [sample_of(20, number) for number in range(4)]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ({"sort": "reward"}, [0, 1, 2, 3]),
        ({"sort": "reward", "order": "desc"}, [3, 2, 1, 0]),
        ({"sort": "length", "order": "desc"}, [1, 3, 0, 2]),
        ({"errors": "1"}, [1]),
        ({"prompt": "1"}, [2, 3]),
        ({"q": "ANSWER 2"}, [2]),
        ({"sort": "error"}, [1, 0, 2, 3]),
    ],
)
def test_samples_are_chosen_and_sorted(query, numbers):
    rows = [sample_of(1, number) for number in range(4)]
    assert [row["reward"] for row in samples.select(rows, query)] == numbers


@pytest.mark.parametrize("rows", [[0.5, 1.0, None, None], [1.0, 0.5, None], ["a-9", "a-11", "b-2"], [9, 11, 21]])
def test_absent_values_are_last_and_9_is_before_11(rows):
    sort, order = "prompt" if None not in rows else "reward", "desc" if rows[0] == 1.0 else "asc"
    samples_ = [{"prompt_id": each, "reward": each} for each in reversed(rows)]
    assert [row["prompt_id"] for row in samples.select(samples_, {"sort": sort, "order": order})] == rows


def test_lineage_lists_trained_samples_with_their_weights(folder):
    rows = samples.lineage(folder, 12)
    assert [row["advantage"] for row in rows] == [-1.5, 0.5, 1.5]
    assert {row["version"] for row in rows} == {11}


# -- events and logs --------------------------------------------------------------------------------------------------


def test_events_and_logs_are_one_stream_in_time(run):
    stream = run.events("", "", "", 100)
    times = [each["at_s"] for each in stream["events"]]
    assert times == sorted(times)
    texts = [each["text"] for each in stream["events"]]
    assert "ROLLOUT[1]: process_died: killed by signal 9" in texts
    assert "08:00:05 W <b>slow</b> red" in texts, "without the terminal's colours"
    again = run.events(stream["next"], "", "", 100)
    assert again["events"] == []
    with (run.folder / "logs/trainer.log").open("a") as log:
        log.write("08:00:09 I step 2\n")
    assert [each["text"] for each in run.events(stream["next"], "", "", 100)["events"]] == ["08:00:09 I step 2"]


def test_events_can_be_searched_and_chosen_by_process(run):
    assert [each["level"] for each in run.events("", "trainer", "SLOW", 100)["events"]] == ["W"]
    (run.folder / "logs/rollout-1.log").write_text("08:00:09 I back\n")
    entries = [run.events("", name, "", 100)["events"] for name in ("ROLLOUT[1]", "rollout-1")]
    assert entries[0] == entries[1] and [each["kind"] for each in entries[0]].count("event") == 2
    with pytest.raises(CallError, match=r"'trainr' has no log; did you mean 'trainer'\?"):
        run.events("", "trainr", "", 100)
    with pytest.raises(CallError, match="'after' is not a cursor that this page gave"):
        run.events("bm9uc2Vuc2U=", "", "", 100)


@pytest.mark.parametrize(
    ("line", "level", "clock"),
    [
        ("2027-01-15 08:01:00 I date first", "I", "08:01:00"),
        ("[ROLLOUT[1]] 2027-01-15 08:01:00 W after the process", "W", "08:01:00"),
        ("[trainer] 08:01:00 E of an earlier version", "E", "08:01:00"),
        ('{"time": "no object', "", "08:00:05"),
        ("  File without a time", "", "08:00:05"),
        ("2027-99-99 99:99:99 I no time of any day", "I", "08:00:05"),
    ],
)
def test_log_lines_have_their_times_and_levels(run, line, level, clock):
    with (run.folder / "logs/trainer.log").open("a") as log:
        log.write(f"{line}\n")
    last = [each for each in run.events("", "trainer", "", 100)["events"] if each["text"] == line]
    assert [(each["level"], datetime.fromtimestamp(each["at_s"]).strftime("%H:%M:%S")) for each in last] == [
        (level, clock)
    ]


def test_log_lines_of_json_are_shown_as_text(run, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_LOG", "json")
    with (run.folder / "logs/trainer.log").open("a") as log:
        log.write(log_line("trainer", "step 2/6  reward \x1b[31m0.5"))
    (last,) = run.events("", "trainer", "step 2/6", 100)["events"]
    assert (last["text"][20:], last["level"]) == ("I step 2/6  reward 0.5", "I")
