// SPDX-License-Identifier: Apache-2.0
// The core of the page: DOM helpers, answers of the server or of the exported file, the router, live updates, and the
// views of the list of runs and of one run. All text of a run becomes text nodes: it is never parsed as HTML.
"use strict";

const SVG_TAGS = new Set(["svg", "rect", "polyline", "text", "defs", "pattern", "path"]);
const ENDED = new Set(["finished", "failed", "stopped"]);
const PHASE_SIGNS = { running: "●", finished: "✓", failed: "✕", stopped: "■" };
const STATE_SIGNS = { up: "●", lost: "✕", starting: "◌", ended: "■" };
const VIEWS = {};
const TABS = {
  run: "Overview", curves: "Curves", step: "Step", samples: "Samples", evaluations: "Evaluations", events: "Events and logs",
};

// ---- DOM ----

/** Create an element; `on...` are handlers, and absent or false attributes are left out. */
function h(tag, attributes, ...children) {
  const isSvg = SVG_TAGS.has(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on") || name === "value" || name === "checked" || name === "adopt") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  const isPresent = (child) => child !== null && child !== undefined && child !== false;
  element.append(...children.flat(Infinity).filter(isPresent));
  return element;
}

const HANDLERS = ["onclick", "onchange", "oninput", "ontoggle", "onsubmit", "onkeydown"];

/** Make `old` like `fresh` with the fewest changes, so that focus, scroll, selections and open details stay. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of HANDLERS) old[name] = fresh[name];
  if (old.adopt) {
    old.adopt(fresh);
    return;
  }
  if ("checked" in fresh) old.checked = fresh.checked;
  if ("value" in fresh && document.activeElement !== old && old.value !== fresh.value) old.value = fresh.value;
  const children = [...fresh.childNodes];
  while (old.childNodes.length > children.length) old.lastChild.remove();
  children.forEach((child, index) => (old.childNodes[index] ? morph(old.childNodes[index], child) : old.append(child)));
}

/** A table in a region that scrolls. Columns: name, cell(row), number (right-aligned), sort (of the route's `sort`). */
function table(caption, columns, rows, { quiet = false, sorted = "", order = "asc", key = null } = {}) {
  const head = columns.map(({ name, number, sort, unseen }) => {
    const direction = sorted === sort ? order : "";
    const label = unseen ? h("span", { class: "unseen" }, name) : name;
    const turn = () => change({ sort, order: direction === "asc" ? "desc" : "asc" });
    const sign = { asc: " ▲", desc: " ▼" }[direction];
    const attributes = { class: number && "number", scope: "col", "aria-sort": sort && sign && `${direction}ending` };
    return h("th", attributes, sort ? h("button", { class: "plain", onclick: turn }, label, sign) : label);
  });
  const body = rows.map((row) => {
    const cells = columns.map((column) => h("td", { class: column.number ? "number" : column.kind }, column.cell(row)));
    return h("tr", { "data-key": key && key(row) }, cells);
  });
  const content = [h("caption", { class: quiet && "unseen" }, caption), h("thead", null, h("tr", null, head))];
  const whole = h("table", null, content, h("tbody", null, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

const openFolds = new Set();

/** A <details> whose body is built when it is opened; it stays open over updates. */
function fold(key, summary, body, attributes = {}) {
  const build = (element) => {
    if (element.open) openFolds.add(key);
    else openFolds.delete(key);
    if (element.open && element.childNodes.length === 1) element.append(h("div", { class: "body" }, body()));
  };
  const isOpen = openFolds.has(key);
  const ontoggle = (event) => build(event.currentTarget);
  const heading = h("summary", null, summary);
  const content = isOpen && h("div", { class: "body" }, body());
  return h("details", { "data-key": key, open: isOpen, ontoggle, ...attributes }, heading, content);
}

const note = (text, kind = "state") => h("p", { class: kind }, text);
const badge = (phase) => h("span", { class: `badge ${phase}` }, `${PHASE_SIGNS[phase] || "◌"} ${phase || "unknown"}`);
const fact = (name, ...value) => h("div", { class: "fact" }, h("dt", null, name), h("dd", null, value));

/** A labelled control: `input` is an element. */
const field = (label, input) => h("label", { class: "field" }, h("span", null, label), input);

function select(label, value, options, onchoose) {
  const items = Object.entries(options).map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  return field(label, h("select", { onchange: (event) => onchoose(event.target.value) }, items));
}

function search(label, value, onsearch) {
  let timer = 0;
  const oninput = ({ target }) => {
    clearTimeout(timer);
    timer = setTimeout(() => onsearch(target.value), 250);
  };
  return field(label, h("input", { type: "search", value: value || "", oninput, spellcheck: "false" }));
}

// ---- Numbers and times ----

function number(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const percent = (share) => (typeof share === "number" ? `${(100 * share).toFixed(1)} %` : "–");

function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function localTime(atS) {
  const at = new Date(atS * 1000);
  const pad = (part) => String(part).padStart(2, "0");
  const day = [at.getFullYear(), pad(at.getMonth() + 1), pad(at.getDate())].join("-");
  return `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(pad).join(":")}`;
}

function ageText(atS) {
  const seconds = Math.max(0, Math.floor(now() - atS));
  return seconds < 1 ? "now" : `${seconds < 60 ? `${seconds} s` : duration(seconds)} ago`;
}

/** The age of a Unix time, which counts on in a live page. */
function age(atS) {
  if (!atS) return "–";
  const iso = new Date(atS * 1000).toISOString();
  return h("time", { datetime: iso, title: localTime(atS), "data-at": isFile ? null : atS }, ageText(atS));
}

// ---- Answers ----

const inlined = document.getElementById("answers");
const ANSWERS = inlined && JSON.parse(inlined.textContent);
const isFile = ANSWERS !== null;
const now = () => (isFile ? ANSWERS["api/runs"]?.now_s || 0 : Date.now() / 1000);

/** Return the server's answer; a file has one for each path, run, step and held-out prompt, and filters it itself. */
async function ask(path, parameters = {}) {
  const sent = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  if (isFile) return findAnswer(path, Object.fromEntries(sent));
  let response;
  try {
    response = await fetch(`${path}?${new URLSearchParams(sent)}`, { credentials: "same-origin" });
  } catch {
    throw new Error("The server does not answer. Check that it runs and that you can reach it.");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Error("Your session has ended: reload the page to log in.");
  if (!response.ok) throw new Error(answer.error || `The server answered with status ${response.status}.`);
  return answer;
}

function findAnswer(path, parameters) {
  let best = null;
  for (const [key, answer] of Object.entries(ANSWERS)) {
    const [place, query = ""] = key.split("?");
    const names = [...new URLSearchParams(query)].filter(([name]) => ["id", "step", "prompt"].includes(name));
    const agrees = names.every(([name, value]) => value === String(parameters[name] ?? ""));
    if (place === path && agrees && names.length > (best?.size ?? -1)) best = { size: names.length, answer };
  }
  if (!best) throw new Error("This part of the run is not in this file.");
  return (FILE_FILTERS[path] || ((answer) => answer))(best.answer, parameters);
}

const FILE_FILTERS = {};

// ---- Addresses: #view/ID[,ID...][/STEP][?parameters] ----

function readAddress() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [, view, ids = "", step] = /^([a-z]*)\/?(.*?)(?:\/(\d+))?$/.exec(path) || [];
  const decoded = ids.split(",").filter(Boolean).map(decodeURIComponent);
  return { view, ids: decoded, id: decoded[0], step: step && Number(step), params: Object.fromEntries(new URLSearchParams(query)) };
}

function address(view, ids, step, params = {}) {
  const sent = Object.entries(params).filter(([, value]) => value !== undefined && value !== "" && value !== null);
  const path = [view, [ids || []].flat().map(encodeURIComponent).join(","), step].filter((part) => part || part === 0);
  return `#${path.join("/")}${sent.length ? `?${new URLSearchParams(sent)}` : ""}`;
}

/** Change parameters of the view that is shown; "" removes one. */
function change(params) {
  const { view, ids, step, params: current } = route;
  history.replaceState(null, "", address(view, ids, step, { ...current, ...params }));
  return show();
}

const link = (text, href, attributes) => h("a", { href, ...attributes }, text);

// ---- Showing a view ----

let route = { view: "", ids: [], params: {} };
let showing = 0;
let shownAt = 0;
const content = document.getElementById("content");

async function show() {
  const token = (showing += 1);
  const next = readAddress();
  if (!VIEWS[next.view] || (next.view !== "runs" && !next.id)) Object.assign(next, { view: "runs", ids: [], id: undefined });
  const place = ({ view, ids, step }) => JSON.stringify([view, ids, step]);
  const isSame = place(route) === place(next);
  route = next;
  content.setAttribute("aria-busy", "true");
  let nodes;
  try {
    next.runs = await Promise.all(next.ids.map((id) => ask("api/run", { id })));
    next.run = next.runs[0];
    nodes = [await VIEWS[next.view](next)].flat(Infinity).filter(Boolean);
  } catch (error) {
    if (!(error instanceof Error) || token !== showing) return;
    if (isSame && shownAt && !error.fatal) setConnection("lost", error.message);
    nodes = isSame && shownAt ? null : [h("h1", { tabindex: "-1" }, "Nothing to show"), failure(error)];
  }
  if (token !== showing) return;
  content.removeAttribute("aria-busy");
  if (nodes && isSame && shownAt) morph(content, h("main", { id: "content", tabindex: "-1" }, nodes));
  else if (nodes) content.replaceChildren(...nodes);
  if (!isSame && shownAt) content.querySelector("h1")?.focus();
  if (!isSame) window.scrollTo(0, 0);
  if (nodes) shownAt = performance.now();
  showHeader(next);
  connect();
}

function failure(error) {
  const again = isFile ? null : h("button", { onclick: show }, "Try again");
  return h("div", { class: "state error", role: "alert" }, h("p", null, error.message), again);
}

function showHeader({ view, ids, run, runs, step }) {
  const title = runs?.map((each) => each.name || each.id).join(", ");
  document.title = [TABS[view] || "Runs", step, title, "DLRover RL"].filter(Boolean).join(" · ");
  const name = run && h("span", { class: "name" }, runs.length > 1 ? `${runs.length} runs` : run.name || run.id);
  const progress = run && h("span", { class: "quiet" }, `step ${number(run.step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}`);
  const status = run && runs.length === 1 ? [badge(run.phase), progress] : [];
  morph(document.getElementById("run"), h("div", { id: "run" }, name, status));
  const tabs = Object.entries(TABS).filter(([key]) => key === "curves" || ids.length === 1);
  const links = tabs.map(([key, text]) => link(text, address(key, ids), { "aria-current": key === view && "page" }));
  morph(document.getElementById("views"), h("nav", { id: "views", "aria-label": "Views of the run", hidden: !run }, run ? links : []));
}

function setConnection(kind, text) {
  const shown = { class: kind, id: "connection", role: "status", title: text };
  const words = { live: "● live", lost: "✕ no answer", file: "exported file", ended: "" };
  morph(document.getElementById("connection"), h("div", shown, words[kind] ?? ""));
}

// ---- Live updates ----

let streams = [];
let streamKey = "";
let timer = 0;

/** Show the view again within a second, at most once in a second. */
function refresh() {
  if (timer || document.hidden) return;
  timer = setTimeout(() => {
    timer = 0;
    show();
  }, Math.max(50, shownAt + 1000 - performance.now()));
}

/** Follow up to three runs of the view: browsers allow six connections to a server. A hidden page follows none. */
function connect() {
  if (isFile) return setConnection("file", `written ${localTime(now())}`);
  const live = (route.runs || []).filter((run) => !ENDED.has(run.phase)).map((run) => run.id ?? route.id);
  const ids = document.hidden ? [] : live.slice(0, 3);
  if (route.view !== "runs" && !live.length) setConnection("ended", "");
  if (ids.join() === streamKey) return undefined;
  streams.forEach((stream) => stream.close());
  streamKey = ids.join();
  streams = ids.map((id) => {
    const stream = new EventSource(`api/stream?${new URLSearchParams({ id })}`);
    stream.addEventListener("change", refresh);
    stream.onopen = () => setConnection("live", "The page follows the run.");
    stream.onerror = () => setConnection("lost", "The connection is being opened again.");
    return stream;
  });
  return undefined;
}

/** Poll what no stream reports: the list of runs, and the lines of logs. */
function poll(counter) {
  if (document.hidden || isFile) return;
  for (const element of document.querySelectorAll("time[data-at]")) element.textContent = ageText(Number(element.dataset.at));
  const isLive = route.runs?.some((run) => !ENDED.has(run.phase));
  if ((route.view === "runs" && counter % 5 === 0) || (route.view === "events" && isLive && counter % 2 === 0)) refresh();
}

// ---- Text at the pointer ----

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text || "";
  if (!text) return;
  tip.style.left = `${Math.max(4, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 16 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 8 : y + 16}px`;
}

function tipOf(event) {
  const target = event.target.closest?.("[data-tip]");
  if (event.target.closest?.(".uplot")) return;
  const box = target?.getBoundingClientRect();
  showTip(target?.dataset.tip, event.clientX ?? box?.left, event.clientY ?? box?.bottom);
}

// ---- The list of runs ----

const picked = new Set();

function spark(values, label) {
  const present = (values || []).filter((value) => typeof value === "number");
  if (present.length < 2) return h("span", { class: "quiet" }, "–");
  const [least, most] = [Math.min(...present), Math.max(...present)];
  const place = (value) => 18 - (16 * (value - least)) / (most - least || 1);
  const points = values.map((value, index) => typeof value === "number" && `${(index * 100) / (values.length - 1)},${place(value)}`);
  const text = `${label} from ${number(present[0])} to ${number(present[present.length - 1])}`;
  const attributes = { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": text };
  return h("svg", attributes, h("polyline", { points: points.filter(Boolean).join(" ") }));
}

const RUN_COLUMNS = [
  { name: "Compare", unseen: true, cell: pickBox },
  { name: "Run", sort: "name", cell: (run) => link(run.name || run.id, address("run", run.id), { title: run.id }) },
  { name: "Started", sort: "started_s", cell: (run) => h("span", { class: "quiet" }, run.started_s ? localTime(run.started_s) : "–") },
  { name: "Owner", sort: "owner", cell: (run) => run.owner || "–" },
  { name: "Phase", sort: "phase", cell: (run) => h("span", { title: run.reason }, badge(run.phase)) },
  { name: "Step", sort: "step", number: true, cell: (run) => `${number(run.step)}${run.total_steps ? ` / ${number(run.total_steps)}` : ""}` },
  { name: "Last step", sort: "last_step_s", cell: (run) => age(run.last_step_s) },
  { name: "Reward", sort: "reward", number: true, cell: (run) => number(run.reward) },
  { name: "Course", cell: (run) => spark(run.spark, "reward") },
  { name: "Goodput", sort: "goodput", number: true, cell: (run) => percent(run.goodput) },
  { name: "Recoveries", sort: "recoveries", number: true, cell: (run) => number(run.recoveries) },
  { name: "Devices", sort: "devices", number: true, cell: (run) => number(run.devices) },
  { name: "Time", sort: "elapsed_s", number: true, cell: (run) => duration(run.elapsed_s) },
];

function pickBox(run) {
  const onchange = ({ target }) => {
    if (target.checked) picked.add(run.id);
    else picked.delete(run.id);
    show();
  };
  return h("input", { type: "checkbox", checked: picked.has(run.id), onchange, "aria-label": `Compare ${run.name || run.id}` });
}

function compareRows(left, right) {
  if (left === right) return 0;
  if (left === null || left === undefined) return 1;
  if (right === null || right === undefined) return -1;
  return left < right ? -1 : 1;
}

VIEWS.runs = async ({ params }) => {
  const { runs } = await ask("api/runs");
  const text = (params.q || "").toLowerCase();
  const matching = runs.filter((run) => [run.id, run.name, run.owner, run.phase].join(" ").toLowerCase().includes(text));
  const { sort: sorted = "started_s", order = "desc" } = params;
  matching.sort((left, right) => (order === "asc" ? 1 : -1) * compareRows(left[sorted], right[sorted]));
  for (const id of picked) if (!runs.some((run) => run.id === id)) picked.delete(id);
  const compare = picked.size > 1 ? link(`Compare ${picked.size} runs`, address("curves", [...picked]), { class: "button" })
    : h("span", { class: "quiet" }, runs.length > 1 ? "Choose two runs or more to compare them." : "");
  const tools = h("div", { class: "tools" }, search("Filter", params.q, (q) => change({ q })), compare);
  const rows = table("Runs", RUN_COLUMNS, matching, { quiet: true, sorted, order, key: (run) => run.id });
  const empty = runs.length ? note(`No run matches “${params.q}”.`) : note("There is no run in this folder yet. A run appears when it starts.");
  return [h("h1", { tabindex: "-1" }, "Runs"), tools, matching.length ? rows : empty];
};

// ---- One run ----

const hatch = () => h("rect", { width: "100%", height: "100%", fill: "url(#hatch)" });

/** A bar of parts; each has label, size, tip and a class. The numbers stand in a table beside it. */
function bar(label, parts, height = 26) {
  const total = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  let at = 0;
  const boxes = parts.map((part) => {
    const [x, width] = [(100 * at) / total, (100 * part.size) / total];
    at += part.size;
    const text = width > 6 && h("text", { x: "5", y: height / 2 + 4 }, part.label);
    const box = h("rect", { width: "100%", height: "100%", class: part.class });
    return h("svg", { x: `${x}%`, width: `${width}%`, height, "data-tip": part.tip }, box, part.hatched && hatch(), text);
  });
  return h("svg", { class: "parts", width: "100%", height, role: "img", "aria-label": label }, boxes);
}

function timeParts(strip) {
  return strip.map(({ use, cause, begin_s: begin, end_s: end }) => {
    const size = Math.max(0, end - begin);
    const reason = cause ? ` (${cause})` : "";
    const label = `${use}${reason}: ${duration(size)}, from ${localTime(begin)} to ${localTime(end)}`;
    return { label: use, size, tip: label, class: `use-${use}`, hatched: use !== "useful" };
  });
}

const sample = (kind, hatched) => h("svg", { class: "sample", width: 14, height: 14 },
  h("rect", { width: "100%", height: "100%", class: kind }), hatched && hatch());

function hours({ strip = [], uses = [], id }) {
  if (!strip.length) return note("The journal has no times yet.");
  const total = uses.reduce((sum, { seconds }) => sum + seconds, 0) || 1;
  const columns = [
    { name: "Use", cell: ({ use }) => [sample(`use-${use}`, use !== "useful"), ` ${use}`] },
    { name: "Cause", cell: ({ cause }) => cause || "–" },
    { name: "Time", number: true, cell: ({ seconds }) => duration(seconds) },
    { name: "Share", number: true, cell: ({ seconds }) => percent(seconds / total) },
  ];
  const ends = h("div", { class: "ends quiet" }, h("span", null, localTime(strip[0].begin_s)), h("span", null, localTime(strip.at(-1).end_s)));
  return [bar("The time of the run by its use; the numbers are in the table below.", timeParts(strip)), ends, table(`Time of ${id} by use`, columns, uses, { quiet: true })];
}

function memberCell(member, id) {
  const process = `${member.role.toLowerCase()}-${member.rank ?? 0}`;
  const heartbeat = typeof member.heartbeat_age_s === "number" ? age(now() - member.heartbeat_age_s) : "–";
  const call = member.call ? `${member.call}${typeof member.call_s === "number" ? `, ${duration(member.call_s)}` : ""}` : "no call";
  const devices = [member.devices ?? []].flat().join(", ");
  const name = link(member.process || process, address("events", id, undefined, { process: member.process || process }));
  const state = h("span", { class: `member-state ${member.state}` }, `${STATE_SIGNS[member.state] || "◌"} ${member.state}`);
  return h("li", { class: `member ${member.state}`, "data-key": `${member.role}-${member.rank}` },
    h("div", { class: "ends" }, h("strong", null, name), state),
    h("div", { class: "call", title: call }, call),
    h("div", { class: "quiet" }, "heartbeat ", heartbeat, devices && ` · device ${devices}`, member.pid && ` · pid ${member.pid}`));
}

function nodes(members, id) {
  if (!members?.length) return note("No process has been placed yet.");
  const names = [...new Set(members.map(({ node }) => node || "not placed"))];
  return names.map((name) => {
    const cells = members.filter(({ node }) => (node || "not placed") === name).map((member) => memberCell(member, id));
    return h("section", { class: "node" }, h("h3", null, name, h("span", { class: "quiet" }, ` ${cells.length} processes`)), h("ul", { class: "grid" }, cells));
  });
}

function firstCause(run) {
  if (!run.cause && !run.message) return null;
  const tries = (run.try || []).map((sentence) => h("li", null, sentence));
  return h("section", { class: `callout ${run.phase === "failed" ? "bad" : ""}` }, h("h2", null, "First cause"),
    h("p", null, run.cause && h("code", null, run.cause), run.cause && ": ", run.message),
    tries.length > 0 && [h("h3", null, "What to try"), h("ul", null, tries)],
    run.detail && fold(`detail-${run.id}`, "Detail", () => h("pre", null, run.detail)));
}

VIEWS.run = ({ id, run }) => {
  const facts = [
    fact("Step", link(`${number(run.step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}`, address("step", id, run.step || undefined))),
    fact("Last step", age(run.last_step_s)), fact("Reward", number(run.reward), " ", spark(run.spark, "reward")),
    fact("Goodput", percent(run.goodput)), fact("Recoveries", link(number(run.recoveries), address("curves", id))),
    fact("Devices", number(run.devices)), fact("Time", duration(run.elapsed_s)), fact("Owner", run.owner || "–"),
  ];
  const settings = Object.entries(run.settings || {}).map(([key, value]) => ({ key, value }));
  const columns = [
    { name: "Setting", kind: "code", cell: ({ key }) => key },
    { name: "Value", kind: "code", cell: ({ value }) => (typeof value === "string" ? value : JSON.stringify(value)) },
  ];
  return [
    h("h1", { tabindex: "-1" }, run.name || id), h("p", { class: "quiet" }, run.folder || id, run.reason && ` · ${run.reason}`),
    h("dl", { class: "facts" }, facts), firstCause(run),
    h("section", null, h("h2", null, "Where the time went"), hours(run)),
    h("section", null, h("h2", null, "Workers by node"), nodes(run.members, id)),
    h("section", null, fold(`settings-${id}`, `Settings (${settings.length})`, () => table("Settings", columns, settings, { quiet: true }))),
  ];
};

// ---- Start ----

document.addEventListener("DOMContentLoaded", () => {
  const line = h("path", { d: "M0 6 L6 0", stroke: "currentColor", "stroke-width": "1.2", opacity: "0.55" });
  const pattern = h("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line);
  document.body.append(h("svg", { class: "defs", width: 0, height: 0, "aria-hidden": "true" }, h("defs", null, pattern)));
  document.querySelector(".skip").onclick = (event) => {
    event.preventDefault();
    content.focus();
  };
  for (const kind of ["pointerover", "pointermove", "focusin"]) document.addEventListener(kind, tipOf);
  document.addEventListener("keydown", (event) => event.key === "Escape" && showTip(""));
  document.addEventListener("visibilitychange", () => (document.hidden ? connect() : show()));
  window.addEventListener("hashchange", show);
  let counter = 0;
  setInterval(() => poll((counter += 1)), 1000);
  show();
});
