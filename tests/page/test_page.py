# SPDX-License-Identifier: Apache-2.0
"""All views of the page in a browser, over the server and from an exported file."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind
from tests.page.browsing import axe_source, until, wait_for_view
from tests.support.run_folder import append_events

pytestmark = [pytest.mark.slow, pytest.mark.needs("playwright")]

STATIC = Path(__file__).parents[2] / "dlrover/python/rl/page/static"
IMAGES = Path(__file__).parents[2] / "docs/images"
VIEWS = {
    "runs": ("#runs", "Runs"),
    "run": ("#run/grpo", "grpo"),
    "failed": ("#run/ppo", "ppo"),
    "curves": ("#curves/grpo?smooth=0.6", "Curves"),
    "compared": ("#curves/grpo,grpo-large,ppo", "Curves"),
    "step": ("#step/grpo/118", "Step 118"),
    "samples": ("#samples/grpo/120", "Samples of step 120"),
    "group": ("#samples/grpo/120?prompt=2", "Samples of step 120"),
    "tokens": ("#samples/grpo/120?prompt=0&colour=mismatch", "Samples of step 120"),
    "evaluations": ("#evaluations/grpo?prompt=5", "Evaluations"),
    "events": ("#events/grpo", "Events and logs"),
}
FILE_VIEWS = ("run", "curves", "step", "samples", "group", "evaluations", "events")
CUT_OFF = """() => [...document.querySelectorAll('#content *, header *')]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && each.getBoundingClientRect().width > 1)
  .filter((each) => !each.closest('.scroll, .sample-row, svg, .side, .log, nav, .plot'))
  .map((each) => each.outerHTML)"""
HOSTILE = "() => [document.title.startsWith('hacked'), document.querySelectorAll('main img, main script').length]"


@pytest.mark.parametrize("view", VIEWS)
def test_view_is_shown_and_texts_of_runs_are_inert(open_page, site, view):
    address, heading = VIEWS[view]
    page = open_page(site + address)
    assert page.locator("h1").inner_text() == heading
    assert page.locator(".state.error").count() == 0
    assert page.evaluate(HOSTILE) == [False, 0]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_view_has_no_serious_finding_of_axe(open_page, site, view, dark):
    page = open_page(site + VIEWS[view][0], dark=dark)
    for summary in page.locator("main summary").all()[:8]:
        summary.click()
    page.evaluate(axe_source())
    violations = page.evaluate("async () => (await axe.run()).violations")
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in serious] == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 22, 29)" if dark else "rgb(246, 247, 249)"
    )


@pytest.mark.parametrize("view", VIEWS)
def test_view_fits_the_width_of_a_phone(open_page, site, view):
    page = open_page(site + VIEWS[view][0], width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(CUT_OFF) == []


@pytest.mark.parametrize("view", VIEWS)
def test_keyboard_reaches_all_controls(open_page, site, view):
    page = open_page(site + VIEWS[view][0])
    page.wait_for_timeout(1500)  # the first event of the stream shows the view again
    page.evaluate("window.refresh = window.poll = () => {}")
    selector = "a[href], button:not(:disabled), input, select, summary, [tabindex='0']"
    controls = page.evaluate(f"""() => [...document.querySelectorAll("{selector}")]
      .filter((each) => each.checkVisibility()).map((each, at) => (each.dataset.number = at)).length""")
    reached, focus = (
        set(),
        "() => [document.activeElement.dataset.number, getComputedStyle(document.activeElement).outlineStyle]",
    )
    for _ in range(controls + 5):
        page.keyboard.press("Tab")
        number, outline = page.evaluate(focus)
        if number is not None:
            assert outline != "none", page.evaluate("document.activeElement.outerHTML")
            reached.add(number)
    assert len(reached) == controls


def test_keyboard_leads_from_the_runs_to_a_step(open_page, site):
    page = open_page(site + "#runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.locator("td a", has_text="grpo-large").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('grpo-large')")
    page.get_by_role("link", name="Step", exact=True).press("Enter")
    page.wait_for_selector("h1:text-is('Step 200')")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    assert page.locator("nav [aria-current=page]").inner_text() == "Step"


def test_recovery_appears_while_watching_and_moves_nothing(open_page, site, runs):
    page = open_page(site + "#curves/grpo")
    rows = page.locator("section table tbody tr")
    before = rows.count()
    search = page.get_by_label("Search metrics")
    search.fill("re")
    wait_for_view(page)
    page.wait_for_timeout(600)
    scroll = page.evaluate("window.scrollTo(0, 120); window.scrollY")
    cause = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "killed by signal 9")
    began_s = time.monotonic()
    append_events(runs["grpo"], time.time(), [(0.0, events.MemberLost("ACTOR", 0, 1, cause))])
    until(page, f"document.querySelectorAll('section table tbody tr').length > {before}", 5.0)
    assert time.monotonic() - began_s < 5
    assert "ACTOR[0]" in rows.last.inner_text() and "under way" in rows.last.inner_text()
    assert page.evaluate("window.scrollY") == scroll
    assert page.evaluate("document.activeElement.type") == "search" and search.input_value() == "re"
    page.goto(site + "#run/grpo")
    page.wait_for_selector(".member.lost, .member.starting")


def test_values_of_steps_equal_the_files(open_page, site, runs):
    lines = (runs["grpo-large"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    chosen = random.Random(0)
    page = open_page(site + "#step/grpo-large/1")
    for step in chosen.sample(range(1, 201), 4):
        page.goto(f"{site}#step/grpo-large/{step}")
        page.wait_for_selector(f"h1:text-is('Step {step}')")
        cells = page.locator("section", has_text="Metrics").last.locator("tbody tr td").all_inner_texts()
        shown = dict(zip(cells[::2], cells[1::2], strict=True))
        for name in chosen.sample(sorted(set(rows[step]) - {"step"}), 5):
            assert float(shown[name]) == rows[step][name]
        parts = page.evaluate(f"ask('api/step', {{ id: 'grpo-large', step: {step} }})")
        assert sum(part["seconds"] for part in parts["parts"]) == pytest.approx(rows[step]["time/step"])
        assert len(page.locator("section", has_text="Parts").first.locator("tbody tr").all()) == len(parts["parts"])


def test_chart_zooms_by_dragging_and_leads_to_a_step(open_page, site):
    page = open_page(site + "#curves/grpo?metrics=loss")
    box = page.locator(".plot .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=5)
    page.mouse.up()
    until(page, "document.querySelector('[type=number]').value !== ''")
    ends = [float(page.get_by_label(name).input_value()) for name in ("From step", "To step")]
    assert ends == pytest.approx([30, 90], abs=2)
    page.get_by_role("button", name="Whole run").click()
    until(page, "document.querySelector('[type=number]').value === ''")
    page.mouse.move(box["x"] + 63 / 120 * box["width"], middle)
    assert "ROLLOUT[1], process_died" in page.locator("#tip").inner_text()
    page.mouse.click(box["x"] + 0.5 * box["width"], middle)
    page.wait_for_selector("h1:text-is('Step 60')")


def test_samples_are_searched_sorted_and_opened(open_page, site):
    page = open_page(site + "#samples/grpo/120")
    page.get_by_label("Errors only").check()
    until(page, "document.querySelectorAll('.sample-card').length === 1")
    page.locator(".sample-card summary").click()
    page.get_by_role("link", name="All samples of this prompt, side by side").click()
    page.wait_for_selector("h2:text-is('Prompt 1')")
    page.get_by_label("Search texts").fill("no such text")
    page.wait_for_selector("text=No sample of this step matches.")


def test_damaged_journal_is_named_by_each_view(open_page, site, runs, tmp_path):
    torn = shutil.copytree(runs["ppo"], runs["grpo"].parent / "torn")
    (torn / "journal.jsonl").write_text("rl-journal 9\n")
    for view in ("run", "curves"):
        assert "is no journal" in open_page(f"{site}#{view}/torn").locator(".state").first.inner_text()
    torn.rename(tmp_path / "torn")  # away from the other tests


def test_rows_without_the_value_are_last_in_both_orders(open_page, site):
    page = open_page(site + "#runs")
    for order, values in (("asc", [1.5, 3, None]), ("desc", [3, 1.5, None]), ("asc", ["a9", "a11", None])):
        assert page.evaluate(f"sorted({json.dumps(values[::-1])}, (value) => value, '{order}')") == values


def test_text_of_the_environment_is_shown_beside_the_tokens(open_page, site):
    page = open_page(site + "#runs")
    row = "{ tokens: ['a'], token_advantages: [1], completion: 'a b', turns: 2 }"
    assert page.evaluate(f"h('p', null, completion({row}, {{}})).querySelector('pre').textContent") == "a b"


@pytest.mark.parametrize("view", FILE_VIEWS)
def test_exported_file_shows_its_views_without_a_network(open_page, exported, view):
    address, heading = VIEWS[view]
    requests = []
    page = open_page(exported + address.replace("grpo", ".").replace("118", "79").replace("120", "79"))
    page.on("request", lambda request: requests.append(request.url))
    assert page.locator("h1").inner_text() == {"run": "ppo"}.get(
        view, heading.replace("118", "79").replace("120", "79")
    )
    assert page.locator(".state").all_inner_texts() == []
    assert page.evaluate(HOSTILE) == [False, 0]
    page.evaluate("show()")
    wait_for_view(page)
    assert requests == []


def test_exported_events_of_a_process_have_those_of_the_journal(open_page, exported):
    page = open_page(exported + "#events/.?process=rollout-1")
    assert "process_died" in "".join(page.locator("ol.log li.of-event").all_inner_texts())


def test_exported_file_says_what_it_does_not_have(open_page, exported):
    page = open_page(exported + "#step/./3")
    assert page.locator(".state.error").inner_text() == "This part of the run is not in this file."


def test_lost_server_is_reported_and_the_view_stays(open_page, site):
    page = open_page(site + "#run/grpo-large")
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('no network')); show(); }")
    page.wait_for_selector("#connection.lost")
    assert page.locator("h1").inner_text() == "grpo-large"


def test_page_is_smaller_than_500_kb():
    assert sum(file.stat().st_size for file in STATIC.iterdir()) < 500_000


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("run", "#run/grpo"),
        ("curves", "#curves/grpo?smooth=0.6"),
        ("compared", "#curves/grpo,grpo-large?metrics=reward/mean,loss"),
        ("step", "#step/grpo/118"),
        ("tokens", "#samples/grpo/120?prompt=0"),
        ("phone", "#run/grpo"),
    ],
)
def test_screenshot_is_written_for_the_documentation(open_page, site, name, address):
    size = {"width": 390, "height": 844, "dark": True} if name == "phone" else {"width": 1200, "height": 760}
    page = open_page(site + address, **size)
    page.evaluate("document.querySelector('h1 + .quiet')?.remove()")  # the folder, another one each time
    file = IMAGES / f"page-{name}.png"
    page.screenshot(path=str(file))
    assert 5_000 < file.stat().st_size < 150_000
