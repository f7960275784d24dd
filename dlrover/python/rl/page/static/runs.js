// SPDX-License-Identifier: Apache-2.0
// The list of runs, and the overview of one.
"use strict";

const PHASE_SIGNS = { running: "●", finished: "✓", failed: "✕", lost: "✕", stopped: "■" };
const STATE_SIGNS = { up: "●", lost: "✕", starting: "◌", ended: "■" };
const picked = new Set();

const badge = (phase) => h("span", { class: `badge ${phase}` }, `${PHASE_SIGNS[phase] || "◌"} ${phase || "unknown"}`);

function spark(values, label) {
  const present = (values || []).filter((value) => typeof value === "number");
  if (present.length < 2) return quiet("–");
  const [least, most] = [Math.min(...present), Math.max(...present)];
  const height = (value) => 18 - (16 * (value - least)) / (most - least || 1);
  const point = (value, at) => typeof value === "number" && `${(at * 100) / (values.length - 1)},${height(value)}`;
  const text = `${label} from ${number(present[0])} to ${number(present.at(-1))}`;
  const frame = { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": text };
  return h("svg", frame, h("polyline", { points: values.map(point).filter(Boolean).join(" ") }));
}

function pickBox(run) {
  const onchange = ({ target }) => {
    if (target.checked) picked.add(run.id);
    else picked.delete(run.id);
    show();
  };
  const label = `Compare ${run.name || run.id}`;
  return h("input", { type: "checkbox", checked: picked.has(run.id), onchange, "aria-label": label });
}

const RUN_COLUMNS = [
  ["Compare", pickBox],
  ["Run", (run) => link(run.name || run.id, address("run", run.id), { title: run.id }), "", "name"],
  ["Started", (run) => (run.started_s ? localTime(run.started_s) : "–"), "quiet", "started_s"],
  ["Owner", "owner", "", "owner"],
  ["Phase", (run) => h("span", { title: run.reason }, badge(run.phase)), "", "phase"],
  ["Step", stepText, "number", "step"],
  ["Last step", (run) => age(run.last_step_s), "", "last_step_s"],
  ["Reward", (run) => number(run.reward), "number", "reward"],
  ["Course", (run) => spark(run.spark, "reward")],
  ["Goodput", (run) => percent(run.goodput), "number", "goodput"],
  ["Recoveries", (run) => number(run.recoveries), "number", "recoveries"],
  ["Devices", (run) => number(run.devices), "number", "devices"],
  ["Time", (run) => duration(run.elapsed_s), "number", "elapsed_s"],
];

/** Order two values by `sign`, absent ones last, and texts by the numbers in them. */
function compareValues(left, right, sign) {
  if (!isPresent(left) || !isPresent(right)) return isPresent(right) - isPresent(left);
  return sign * (typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right);
}

const sorted = (rows, value, order) =>
  [...rows].sort((left, right) => compareValues(value(left), value(right), order === "asc" ? 1 : -1));

VIEWS.runs = async ({ params }) => {
  const { runs } = await ask("api/runs");
  for (const id of picked) if (!runs.some((run) => run.id === id)) picked.delete(id);
  const text = (params.q || "").toLowerCase();
  const words = (run) => [run.id, run.name, run.owner, run.phase].join(" ").toLowerCase();
  const matching = runs.filter((run) => words(run).includes(text));
  const order = { sort: params.sort || "started_s", order: params.order || "desc" };
  const rows = sorted(matching, (run) => run[order.sort], order.order);
  const compare = picked.size > 1
    ? link(`Compare ${picked.size} runs`, address("curves", [...picked]), { class: "button" })
    : quiet(runs.length > 1 && "Choose two runs or more to compare them.");
  const empty = runs.length ? `No run matches “${params.q}”.` : "There is no run in this folder yet.";
  return [title("Runs"), h("div", { class: "tools" }, search("Filter", params.q, (q) => change({ q })), compare),
    rows.length ? table("Runs", RUN_COLUMNS, rows, { sorted: order, key: (run) => run.id }) : note(empty)];
};

// ---- One run ----

function hours({ strip = [], uses = [], phase, journal_error: error }) {
  if (!strip.length) return note(error || "The journal has no times yet.");
  const begin = strip[0].begin_s;
  const endOf = (use) => use.end_s || Math.max(now(), use.begin_s);
  const end = endOf(strip.at(-1));
  const parts = strip.map((use) => {
    const cause = use.cause ? ` (${use.cause})` : "";
    const times = `${localTime(use.begin_s)} to ${use.end_s ? localTime(use.end_s) : "now"}`;
    const text = `${use.use}${cause}: ${duration(endOf(use) - use.begin_s)}, ${times}`;
    const place = { begin: use.begin_s - begin, end: endOf(use) - begin, isHatched: use.use !== "useful" };
    return { ...place, label: use.use, tip: text, class: `use-${use.use}` };
  });
  const total = uses.reduce((sum, { seconds }) => sum + seconds, 0) || 1;
  const columns = [
    ["Use", ({ use }) => [sample(`use-${use}`, use !== "useful"), ` ${use}`]], ["Cause", "cause"],
    ["Time", ({ seconds }) => duration(seconds), "number"],
    ["Share", ({ seconds }) => percent(seconds / total), "number"],
  ];
  const ends = [quiet(localTime(begin)), quiet(ENDED.has(phase) ? localTime(end) : "now")];
  return [boxes("The time of the run by its use; the table below has the numbers.", end - begin, 26, parts),
    h("div", { class: "ends" }, ends), table("Time of the run by its use", columns, uses)];
}

function memberCell(member, id) {
  const heartbeat = typeof member.heartbeat_age_s === "number" ? age(now() - member.heartbeat_age_s) : "–";
  const spent = typeof member.call_s === "number" ? `, ${duration(member.call_s)}` : "";
  const call = member.call ? `${member.call}${spent}` : "no call";
  const name = link(member.process, address("events", id, undefined, { process: logName(member.process) }));
  const sign = `${STATE_SIGNS[member.state] || "◌"} ${member.state}`;
  const device = [member.devices ?? []].flat().join(", ");
  return h("li", { class: `member ${member.state}`, "data-key": member.process },
    h("div", { class: "ends" }, h("strong", null, name), h("span", { class: "member-state" }, sign)),
    h("div", { class: "call", title: call }, call),
    quiet("heartbeat ", heartbeat, device && ` · device ${device}`, member.pid ? ` · pid ${member.pid}` : ""));
}

function workers(members, id) {
  if (!members?.length) return note("No process has been placed yet.");
  const nodeOf = (member) => member.node || "no node";
  return [...new Set(members.map(nodeOf))].map((node) => {
    const cells = members.filter((member) => nodeOf(member) === node).map((member) => memberCell(member, id));
    const heading = h("h3", null, node, quiet(` ${cells.length} ${cells.length > 1 ? "processes" : "process"}`));
    return h("section", { "data-key": node }, heading, h("ul", { class: "grid" }, cells));
  });
}

function firstCause(run) {
  if (!run.cause && (!ENDED.has(run.phase) || run.phase === "finished")) return null;
  const cause = [run.cause && h("code", null, run.cause), run.cause && run.message && ": ", run.message];
  const advice = (run.try || []).map((sentence) => h("li", null, sentence));
  return h("section", { class: `callout ${ENDED.has(run.phase) ? "bad" : ""}` },
    h("h2", null, run.phase === "running" ? "The last failure" : "First cause"), h("p", null, cause),
    advice.length > 0 && [h("h3", null, "What to try"), h("ul", null, advice)],
    run.detail && fold(`detail-${run.id}`, "Detail", () => h("pre", null, run.detail)));
}

VIEWS.run = ({ id, run }) => {
  const cause = firstCause(run);
  const facts = [
    fact("Step", run.step ? link(stepText(run), address("step", id, run.step)) : stepText(run)),
    fact("Last step", age(run.last_step_s)), fact("Reward", number(run.reward), " ", spark(run.spark, "reward")),
    fact("Goodput", percent(run.goodput)), fact("Recoveries", link(number(run.recoveries), address("curves", id))),
    fact("Devices", number(run.devices)), fact("Time", duration(run.elapsed_s)), fact("Owner", run.owner || "–"),
  ];
  const settings = Object.entries(run.settings || {});
  const value = ([, each]) => (typeof each === "string" ? each : JSON.stringify(each));
  const columns = [["Setting", ([key]) => key, "code"], ["Value", value, "code"]];
  return [
    title(run.name || id), h("p", { class: "quiet" }, run.folder || id,
      (!cause || run.journal_error) && run.reason && ` · ${run.reason}`),
    h("dl", { class: "facts" }, facts), cause, section("Where the time went", hours(run)),
    section("Workers by node", workers(run.members, id)),
    fold(`settings-${id}`, `Settings (${settings.length})`, () => table("Settings", columns, settings)),
  ];
};
