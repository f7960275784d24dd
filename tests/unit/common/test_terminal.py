# SPDX-License-Identifier: Apache-2.0
"""Text of jobs on a terminal: controls and marks of direction are shown, not obeyed."""

import io
import json
import logging
import sys
import unicodedata
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli import operate
from dlrover.python.rl.common.log import configure_logging, inert
from dlrover.python.rl.master.client.views import JobView
from dlrover.python.rl.runtime.run.progress import ProgressView, print_summary

EVIL = "a\x1b]0;title\x07b\x9b2Jc\u202etxt\u2066d\u200fe\x1b[31mred\x1b[0m"
INERT = r"a\x1b]0;title\x07b\x9b2Jc\u202etxt\u2066d\u200fered"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, INERT),
        ("\x1b]8;;http://host\x1b\\link", r"\x1b]8;;http://host\x1b\link"),
        ("one\r\ntwo\rthree\n\tfour", "one\ntwo\nthree\n\tfour"),
        ("\x1bc\x1b[2J\x00\x7f", r"\x1bc\x1b[2J\x00\x7f"),
        ("plain: é 漢字 שלום 🙂", "plain: é 漢字 שלום 🙂"),
    ],
)
def test_inert_text_shows_controls(text, shown):
    assert inert(text) == shown


def test_inert_text_has_no_control_of_any_kind():
    text = inert("".join(map(chr, range(0x3000))))
    assert {unicodedata.category(letter) for letter in set(text) - {"\n", "\t"}}.isdisjoint({"Cc", "Zl", "Zp"})
    marks = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert marks.isdisjoint(map(unicodedata.bidirectional, text))


class Jobs:
    """One job, which has ended."""

    list_jobs = staticmethod(lambda: ([VIEW], 0))
    get = wait = stop = staticmethod(lambda name, *_: VIEW)
    history = staticmethod(lambda view: None)
    logs = staticmethod(lambda name, process, follow, tail: iter([("trainer", f"{EVIL}\n")]))


VIEW = JobView("job", "failed", True, reason=EVIL, cause="user_error", detail=EVIL, activity=EVIL, folder=f"/{EVIL}")


@pytest.mark.parametrize("verb", ["list", "status", "wait", "stop", "logs", "explain"])
def test_verbs_print_inert_text(verb, monkeypatch):
    monkeypatch.setattr(operate, "connect", lambda *_: nullcontext(Jobs()))
    command = next(each for each in operate.VERBS if each.name == verb)
    done = CliRunner().invoke(command, [] if verb == "list" else ["job"], color=True)
    assert INERT.split("d\\u200f")[0] in done.output.replace("\n", "")
    assert inert(done.output) == done.output


@pytest.mark.parametrize("route", ["activity", "summary", "log line"])
def test_progress_summary_and_log_are_inert(route, monkeypatch):
    stream = io.StringIO()
    if route == "activity":
        with ProgressView("job", stream) as view:
            view.announce(EVIL)
    elif route == "summary":
        monkeypatch.setattr(sys, "stdout", stream)
        print_summary("job", '{"[link=http://host]x": "a\\u001b]0;t"}')
        assert "[link=http://host]x" in stream.getvalue()
    else:
        logger = logging.getLogger("dlrover")
        for name, value in {"handlers": [], "propagate": False, "level": logger.level}.items():
            monkeypatch.setattr(logger, name, value)
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging()
        logger.warning("%s", EVIL)
    assert "a\\x1b]0;t" in stream.getvalue() and inert(stream.getvalue()) == stream.getvalue()


def test_log_as_json_has_the_process_and_the_error(monkeypatch):
    logger, stream = logging.getLogger("dlrover"), io.StringIO()
    for name, value in {"handlers": [], "propagate": False, "level": logger.level}.items():
        monkeypatch.setattr(logger, name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("DLROVER_RL_LOG", "json")
    configure_logging("ROLLOUT[1]")
    try:
        raise ValueError("three\nlines")
    except ValueError:
        logger.exception("it failed: %s", EVIL)
    line = json.loads(stream.getvalue())
    assert (line["process"], line["level"], line["module"]) == ("ROLLOUT[1]", "ERROR", "dlrover")
    assert "Traceback" in line["message"] and "\x1b" not in stream.getvalue()


def test_output_of_ray_processes_is_inert():
    pytest.importorskip("ray")
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    from dlrover.python.rl.runtime.ray.cluster.cluster import _inert_output

    printed = []
    with _inert_output():
        dispatcher.add_handler("test", printed.append)
        dispatcher.emit({"lines": [EVIL, "plain"], "pid": 1, "is_err": False})
    dispatcher.remove_handler("test")
    assert printed[0]["lines"] == [INERT, "plain"] and not dispatcher.handlers
