# SPDX-License-Identifier: Apache-2.0
"""The server of the page: answers, errors, headers, tokens, and the exported file."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from dlrover.python.rl.common.errors import AccessDenied
from dlrover.python.rl.page.app import create_app
from dlrover.python.rl.page.export import export
from dlrover.python.rl.page.run_data import RunFolders
from dlrover.python.rl.service.jobs.records import JobRecord
from dlrover.python.rl.service.page import ServiceRuns
from tests.support.run_folder import write_run

HOST = "http://127.0.0.1:8480"


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "toy", steps=6, lost_at=2)
    return tmp_path


@pytest.fixture
def client(root):
    return TestClient(create_app(RunFolders([root])), base_url=HOST)


@pytest.mark.parametrize("name", ["run", "metrics", "curves", "marks", "step", "samples", "evaluations", "events"])
def test_page_answers_each_question_about_a_run(client, name):
    answer = client.get(f"/api/{name}?id=toy&step=2")
    assert answer.status_code == 200
    assert "error" not in answer.json()


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("run?id=tyo", 400, "there is no run 'tyo'; did you mean 'toy'?"),
        ("run?id=../../etc", 400, "there is no run '../../etc'; known: toy"),
        ("step?id=toy&step=x", 400, "'step' must be a whole number, not 'x'"),
        ("step?id=toy", 400, "'step' must be a whole number, not ''"),
        ("samples?id=toy&sort=rewrd", 400, "samples cannot be sorted by 'rewrd'; did you mean 'reward'?"),
        ("trace?id=toy&steps=1:99", 400, "a trace has at most 50 steps"),
        ("trace?id=toy&steps=1:2", 400, "steps 1 to 2 have no spans: spans_mb may be 0, or their files were rotated"),
        ("nothing", 404, "there is no 'api/nothing'"),
    ],
)
def test_page_refuses_a_wrong_question_in_one_line(client, query, status, message):
    answer = client.get(f"/api/{query}")
    assert (answer.status_code, answer.json()) == (status, {"error": message})


def test_page_compares_runs_whose_names_have_a_comma(client, root):
    write_run(root / "a,b", steps=5)
    settings = client.get("/api/diff", params={"ids": "a%2Cb,toy"}).json()["settings"]
    assert {each["key"]: each["values"] for each in settings}["config.steps"] == [5, 6]


def test_page_confines_itself_and_other_sites(client):
    assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403
    named = TestClient(create_app(RunFolders([]), names=["proxy.example"]), base_url=HOST)
    assert named.get("/api/runs", headers={"Host": "proxy.example"}).status_code == 200
    assert client.get("/api/runs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/static/..%2fapp.py").status_code == 404


def test_page_streams_a_change_within_seconds(client, root):
    with client.stream("GET", "/api/stream?id=toy") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: change"
        assert json.loads(next(lines).removeprefix("data: "))["step"] == 6


def test_damaged_run_is_an_error_of_its_own_and_hides_no_other(client, root):
    folder = write_run(root / "odd", steps=3, lost_at=0)
    (folder / "journal.1x.jsonl").write_text("")
    aliases = "".join(f"  a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12))
    (folder / "job.yaml").write_text(f"config:\n  a0: &a0 [x, x]\n{aliases}")
    rows = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["toy"]["step"] == 6
    assert rows["odd"]["reason"].startswith("its files cannot be read: ValueError")
    answer = client.get("/api/run?id=odd")
    assert answer.status_code == 500 and answer.json()["error"].startswith("its files cannot be shown: ValueError")
    (folder / "journal.1x.jsonl").unlink()
    assert client.get("/api/run?id=odd").json()["settings"] == {}, "a description that would grow is not read"


def test_run_is_looked_up_outside_the_event_loop(root):
    class Asking(RunFolders):
        def get(self, run_id):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            return super().get(run_id)

    client = TestClient(create_app(Asking([root])), base_url=HOST)
    assert client.get("/api/trace?id=tyo&steps=1").status_code == 400
    assert client.get("/api/stream?id=tyo").status_code == 400


async def test_page_of_the_service_names_the_owners_of_jobs(root):
    record = JobRecord("toy", "r1", "bob", "", folder=str(root / "toy"))
    runs = ServiceRuns(SimpleNamespace(list_jobs=lambda ended: [record]))
    overview = await asyncio.to_thread(lambda: runs.get("toy/r1").overview())
    assert (overview["owner"], RunFolders([root]).get("toy").overview()["owner"]) == ("bob", "ada")


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(root):
    def check(token: str) -> None:
        if token != "right":
            raise AccessDenied("no")

    tries = iter([True, True, False])
    app = create_app(RunFolders([root]), check, lambda address: next(tries))
    return TestClient(app, base_url=HOST, follow_redirects=False)


def test_page_with_tokens_shows_only_the_log_in(locked):
    assert "<form" in locked.get("/").text
    for path in ("/api/runs", "/static/page.js", "/api/stream?id=toy"):
        assert (locked.get(path).status_code, "toy" in locked.get(path).text) == (401, False)
    assert locked.get("/api/runs", headers={"Authorization": "Bearer right"}).status_code == 200


def test_page_log_in_sets_a_cookie_that_scripts_cannot_read(locked):
    assert locked.post("/login", data={"token": "wrong"}).status_code == 401
    answer = locked.post("/login", data={"token": "right"})
    assert answer.status_code == 303
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert locked.get("/api/runs").status_code == 200


def test_page_log_in_is_limited(locked):
    statuses = [locked.post("/login", data={"token": "wrong"}).status_code for _ in range(3)]
    assert statuses == [401, 401, 429]
    assert locked.post("/login", data={"token": "x" * 5000}).status_code == 413


# -- the exported file ------------------------------------------------------------------------------------------------


def test_export_has_the_answers_and_no_way_out(root):
    text = export(root / "toy")
    (content,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', text, re.DOTALL)
    answers = json.loads(content)
    assert answers["api/run?id=."]["phase"] == "finished"
    assert len(answers["api/curves?id=."]["step"]) == 6
    assert answers["api/samples?id=.&step=2"]["total"] == 4
    assert "api/step?id=.&step=6" in answers
    assert "<script>alert" not in text, "a model's text ends no script"
    assert not re.search(r'(src|href)="(?!data:|#)', text.replace(content, ""))
