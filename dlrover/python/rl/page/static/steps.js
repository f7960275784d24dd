// SPDX-License-Identifier: Apache-2.0
// The view of one step, and that of events and logs.
"use strict";

const methodColours = new Map();

/** One of eight classes, the same for a name in all steps that are shown. */
function methodClass(name) {
  if (!methodColours.has(name)) methodColours.set(name, colourOf(methodColours.size));
  return `series-${methodColours.get(name)}`;
}

/** Links to the steps beside the shown one, and a field for any. */
function stepTools({ view, id, step, params }, first, last, ...links) {
  const go = (to) => address(view, id, to, { ...params, offset: "" });
  const off = { class: "button off", "aria-disabled": "true" };
  const button = (text, to) => link(text, go(to), { class: "button" });
  const beside = (text, to) => (to >= first && to <= last ? button(text, to) : h("span", off, text));
  const onchange = ({ target }) => (location.hash = go(target.value));
  return h("div", { class: "tools" }, beside("← Previous", step - 1),
    field("Step", h("input", { type: "number", min: first, max: last, value: String(step), onchange })),
    beside("Next →", step + 1), last > step && button("Last step", last), links);
}

function lane({ process, spans }, end) {
  const parts = spans.map((span) => {
    const phases = Object.entries(span.phases || {}).map(([name, seconds]) => `\n  ${name}: ${duration(seconds)}`);
    const cause = span.cause && !span.label.includes(span.cause) ? ` (${span.cause})` : "";
    const text = `${process}: ${span.label}, ${duration(span.end_s - span.begin_s)}${cause}${phases.join("")}`;
    const place = { begin: span.begin_s, end: span.end_s, isHatched: span.kind !== "call" };
    return { ...place, label: span.label, tip: text, class: spanClass(span) };
  });
  const label = `${process}: ${spans.length} spans; the table below has their times`;
  return h("div", { class: "lane", "data-key": process }, h("div", null, process), boxes(label, end, 22, parts));
}

const spanClass = ({ kind, label }) => (kind === "call" ? methodClass(label) : `span-${kind}`);

function lanes({ lanes: all = [], total_s: total, step }) {
  const rows = all.flatMap(({ process, spans }) => spans.map((span) => ({ process, ...span })));
  if (!rows.length) return note("This step has no spans: they were off (spans_mb: 0), or their file was rotated.");
  const end = Math.max(total || 0, ...rows.map((span) => span.end_s));
  const times = [0, 1, 2, 3, 4].map((part) => h("span", null, duration((end * part) / 4)));
  const words = ({ kind, label }) => ({ call: label, wait: "waiting", down: "being replaced" })[kind];
  const kinds = [...new Map(rows.map((span) => [words(span), span]))];
  const keys = kinds.map(([text, span]) => h("li", null, sample(spanClass(span), span.kind !== "call"), ` ${text}`));
  const columns = [["Process", "process"], ["Begin", (span) => duration(span.begin_s), "number"],
    ["Time", (span) => duration(span.end_s - span.begin_s), "number"], ["Span", "label"], ["Cause", "cause"]];
  const axis = h("div", { class: "lane quiet", "aria-hidden": "true" }, h("div"), h("div", { class: "ends" }, times));
  return [h("ul", { class: "legend" }, keys), h("div", { class: "lanes" }, axis, all.map((each) => lane(each, end))),
    fold(`spans-${step}`, `All ${rows.length} spans`, () => table("Spans of the step", columns, rows))];
}

function partsOfStep({ parts, total_s: total }) {
  if (!parts.length) return note("This step has no times.");
  let end = 0;
  const bar = parts.map(({ name, seconds }) => {
    const begin = end;
    end += seconds;
    const text = `${name}: ${duration(seconds)}, ${percent(seconds / total)}`;
    return { begin, end, label: name, tip: text, class: methodClass(name) };
  });
  const columns = [["Part", ({ name }) => [sample(methodClass(name)), ` ${name}`]],
    ["Time", ({ seconds }) => duration(seconds), "number"],
    ["Share", ({ seconds }) => percent(seconds / total), "number"]];
  const label = "Parts of the step; the table below has the numbers.";
  return [boxes(label, end, 26, bar), table("Parts of the step", columns, parts)];
}

function findingsOf({ findings, lanes: all }) {
  const quietly = h("p", { class: "callout good" }, "✓ No worker stands out in this step.");
  if (!findings?.length) return all?.length ? quietly : null;
  return findings.map(({ sentence, remedy, cost_s: cost }) => h("div", { class: "callout bad" },
    h("p", null, h("strong", null, sentence), ` Cost: ${duration(cost)}.`), remedy && h("p", null, remedy)));
}

VIEWS.step = async (shown) => {
  const { id, run } = shown;
  shown.step ??= run.step || 1;
  const answer = await ask("api/step", { id, step: shown.step }).catch((error) => ({ error }));
  if (answer.error && !run.step) return [title("Step"), note("No step has begun yet.")];
  const trace = `api/trace?${query({ id, steps: `${shown.step}:${shown.step}` })}`;
  const perfetto = { class: "button", download: "", title: "Opens at ui.perfetto.dev" };
  const links = [link("Samples", address("samples", id, shown.step), { class: "button" }),
    !isFile && answer.lanes?.length > 0 && link("Perfetto trace", trace, perfetto)];
  const head = [title(`Step ${shown.step}`), stepTools(shown, answer.first ?? 1, answer.last ?? run.step, links)];
  if (answer.error) return [head, failure(answer.error)];
  const end = answer.is_unfinished ? ", unfinished" : "";
  const began = answer.began_s ? `, begun ${localTime(answer.began_s)}` : "";
  const columns = [["Metric", ([name]) => name], ["Value", ([, value]) => String(value ?? "–"), "number"]];
  return [
    head, h("p", { class: "quiet" }, `${duration(answer.total_s)}${end}${began}`), findingsOf(answer),
    section("Parts", partsOfStep(answer)), section("Workers", lanes(answer)),
    section("Metrics", table("Metrics of the step", columns, Object.entries(answer.metrics))),
  ];
};

// ---- Events and logs ----

const KEPT_EVENTS = 2000;
let stream = { key: "", events: [], next: "" };

const LEVELS = { D: "debug", I: "info", W: "warning", E: "error", C: "error" };
const CLOCK = /^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d[,.\d]* (?:[DIWEC] )?/;

function eventLine({ kind, level, at_s: at, process, text }) {
  const word = kind === "event" ? "◆ event" : LEVELS[level] || level || "";
  const line = kind === "event" ? text : text.replace(CLOCK, "");
  return h("li", { class: `of-${kind} ${word}` }, h("time", null, at ? localTime(at) : ""),
    h("span", null, process || "master"), h("span", { class: "level" }, word), h("span", { class: "line" }, line));
}

/** Lines are added at the end, and the box follows them unless "Follow" is off. */
VIEWS.events = async ({ id, params }) => {
  const chosen = { id, q: params.q, process: params.process };
  const key = JSON.stringify(chosen);
  if (stream.key !== key) stream = { key, events: [], next: "" };
  const current = stream;
  const after = current.next;
  const answer = await ask("api/events", { ...chosen, after, limit: 500 });
  if (current.next === after) current.events = [...current.events, ...answer.events].slice(-KEPT_EVENTS);
  current.next = answer.next;
  const processes = Object.fromEntries(answer.processes.map((name) => [name, name]));
  const tools = h("div", { class: "tools" }, search("Search", params.q, (q) => change({ q })),
    select("Process", params.process || "", { "": "all processes", ...processes }, (process) => change({ process })),
    check("Follow", params.follow !== "off", (isOn) => change({ follow: isOn ? "" : "off" })));
  requestAnimationFrame(() => {
    const box = document.querySelector("ol.log");
    if (box && params.follow !== "off") box.scrollTop = box.scrollHeight;
  });
  const frame = { class: "log", tabindex: "0", "aria-label": "Events and lines of logs, oldest first" };
  const empty = note(params.q || params.process ? "No line matches." : "There is no event yet.");
  const { events: lines } = current;
  return [title("Events and logs"), tools, lines.length ? h("ol", frame, lines.map(eventLine)) : empty];
};

const logName = (process) => process.toLowerCase().replace("[", "-").replace("]", "");

FILE_FILTERS["api/events"] = (answer, { q = "", process, after }) => {
  const words = (each) => `${each.process} ${each.text}`.toLowerCase();
  const isOf = (each) => !process || logName(each.process) === process;
  const isChosen = (each) => words(each).includes(q.toLowerCase()) && isOf(each);
  return { ...answer, events: after ? [] : answer.events.filter(isChosen), next: "end" };
};
