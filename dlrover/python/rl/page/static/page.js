// SPDX-License-Identifier: Apache-2.0
// The core of the page: elements, numbers, answers of the server or of the exported file, the router, live updates.
// Text of a run is only ever set as text, never parsed as HTML.
"use strict";

const SVG_TAGS = new Set(["svg", "rect", "polyline", "text", "defs", "pattern", "path"]);
const PROPERTIES = new Set(["value", "checked", "adopt"]);
const HANDLERS = ["onclick", "onchange", "oninput", "ontoggle"];
const ENDED = new Set(["finished", "failed", "stopped", "lost"]);
const VIEWS = {};
const TABS = {
  run: "Overview", curves: "Curves", step: "Step", samples: "Samples", evaluations: "Evaluations",
  events: "Events and logs",
};

// ---- Elements ----

const isPresent = (value) => value !== null && value !== undefined && value !== false;

/** Create an element; names with "on" are handlers, and absent or false attributes and children are left out. */
function h(tag, attributes, ...children) {
  const space = SVG_TAGS.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on") || PROPERTIES.has(name)) element[name] = value;
    else if (isPresent(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(isPresent));
  return element;
}

/** Make `old` like `fresh` with few changes, so that focus, scroll, selections and open details stay. */
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) return old.data === fresh.data || (old.data = fresh.data);
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
  }
  for (const name of HANDLERS) old[name] = fresh[name];
  if (old.adopt) return old.adopt(fresh);
  if ("checked" in fresh) old.checked = fresh.checked;
  if ("value" in fresh && document.activeElement !== old && old.value !== fresh.value) old.value = fresh.value;
  const children = [...fresh.childNodes];
  while (old.childNodes.length > children.length) old.lastChild.remove();
  children.forEach((child, at) => (old.childNodes[at] ? morph(old.childNodes[at], child) : old.append(child)));
  return old;
}

const link = (text, href, attributes) => h("a", { href, ...attributes }, text);
const quiet = (...content) => h("span", { class: "quiet" }, content);
const unseen = (text) => h("span", { class: "unseen" }, text);
const title = (text) => h("h1", { tabindex: "-1" }, text);
const section = (text, ...content) => h("section", null, h("h2", null, text), content);
const note = (text) => h("p", { class: "state" }, text);
const fact = (name, ...value) => h("div", { class: "fact" }, h("dt", null, name), h("dd", null, value));
const field = (label, input) => h("label", { class: "field" }, h("span", null, label), input);

function check(label, checked, onchoose) {
  const onchange = ({ target }) => onchoose(target.checked);
  return h("label", { class: "check" }, h("input", { type: "checkbox", checked, onchange }), ` ${label}`);
}

function select(label, value, texts, onchoose) {
  const option = ([key, text]) => h("option", { value: key, selected: key === value }, text);
  const onchange = ({ target }) => onchoose(target.value);
  return field(label, h("select", { onchange }, Object.entries(texts).map(option)));
}

function search(label, value, onsearch) {
  let timer = 0;
  const oninput = ({ target }) => {
    clearTimeout(timer);
    timer = setTimeout(() => onsearch(target.value), 250);
  };
  return field(label, h("input", { type: "search", value: value || "", oninput, spellcheck: "false" }));
}

/** A table in a region that scrolls. A column is [name, cell(row) or key, class of its cells, key to sort by]; `sorted`
 * are the parameters of the address by which the rows are sorted. */
function table(caption, columns, rows, { sorted = {}, key = null } = {}) {
  const head = columns.map(([name, , kind, sort]) => {
    const order = sort && sort === sorted.sort && sorted.order;
    const turn = () => change({ sort, order: order === "asc" ? "desc" : "asc" });
    const sign = { asc: " ▲", desc: " ▼" }[order];
    const label = sort ? h("button", { class: "plain", onclick: turn }, name, sign) : name;
    return h("th", { class: kind, scope: "col", "aria-sort": order && `${order}ending` }, label);
  });
  const cellOf = (cell, row) => (typeof cell === "function" ? cell(row) : row[cell] || "–");
  const body = rows.map((row) => {
    const cells = columns.map(([, cell, kind]) => h("td", { class: kind }, cellOf(cell, row)));
    return h("tr", { "data-key": key && key(row) }, cells);
  });
  const parts = [h("caption", { class: "unseen" }, caption), h("thead", null, h("tr", null, head))];
  const whole = h("table", null, parts, h("tbody", null, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

const openFolds = new Set();

/** A <details> whose body is built when it is opened, and that stays open over updates. */
function fold(key, summary, body, kind = null) {
  const built = () => h("div", { class: "body" }, body());
  const ontoggle = ({ currentTarget: element }) => {
    if (element.open) openFolds.add(key);
    else openFolds.delete(key);
    if (element.open && element.childNodes.length === 1) element.append(built());
  };
  const open = openFolds.has(key);
  return h("details", { "data-key": key, open, ontoggle, class: kind }, h("summary", null, summary), open && built());
}

const hatch = () => h("rect", { width: "100%", height: "100%", fill: "url(#hatch)" });

/** A coloured sample for a legend, hatched if the colour alone would not tell. */
function sample(kind, isHatched) {
  const box = h("rect", { width: "100%", height: "100%", class: kind });
  return h("svg", { class: "sample", width: 14, height: 14, "aria-hidden": "true" }, box, isHatched && hatch());
}

/** Boxes side by side on a line of length `end`; a box has begin, end, label, tip, class and isHatched. */
function boxes(label, end, height, parts) {
  const shown = parts.map((part) => {
    const width = (100 * (part.end - part.begin)) / (end || 1);
    const box = h("rect", { width: "100%", height: "100%", class: part.class });
    const text = width > 5 && h("text", { x: 5, y: height / 2 + 4, class: part.class }, part.label);
    const place = { x: `${(100 * part.begin) / (end || 1)}%`, width: `${width}%`, height, "data-tip": part.tip };
    return h("svg", place, box, part.isHatched && hatch(), text);
  });
  return h("svg", { class: "boxes", width: "100%", height, role: "img", "aria-label": label }, shown);
}

// ---- Numbers and times ----

function number(value) {
  if (!isPresent(value) || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const percent = (share) => (typeof share === "number" ? `${(100 * share).toFixed(1)} %` : "–");

function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 0.9995) return seconds ? `${Math.round(seconds * 1000)} ms` : "0 s";
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function localTime(atS) {
  const at = new Date(atS * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join("-");
  return `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")}`;
}

function ageText(atS) {
  const seconds = Math.max(0, Math.floor(now() - atS));
  return seconds < 1 ? "now" : `${seconds < 60 ? `${seconds} s` : duration(seconds)} ago`;
}

/** The age of a Unix time, which rises in a live page. */
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
const FILE_FILTERS = {}; // by path: (answer, parameters) => the part that a server would have chosen

const isSent = ([, value]) => isPresent(value) && value !== "";
const query = (parameters) => new URLSearchParams(Object.entries(parameters).filter(isSent));

async function ask(path, parameters = {}) {
  const sent = query(parameters);
  if (isFile) return findAnswer(path, Object.fromEntries(sent));
  let response;
  try {
    response = await fetch(`${path}?${sent}`, { credentials: "same-origin" });
  } catch {
    throw new Error("The server does not answer. Check that it runs and that you can reach it.");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Error("Your session has ended: reload the page to log in.");
  if (!response.ok) throw new Error(answer.error || `The server answered with status ${response.status}.`);
  return answer;
}

/** A file has one answer for each path, run, step and held-out prompt. */
function findAnswer(path, parameters) {
  let best = null;
  for (const [key, answer] of Object.entries(ANSWERS)) {
    const [place, text = ""] = key.split("?");
    const names = [...new URLSearchParams(text)].filter(([name]) => ["id", "step", "prompt"].includes(name));
    const agrees = names.every(([name, value]) => value === String(parameters[name] ?? ""));
    if (place === path && agrees && names.length > (best?.size ?? -1)) best = { size: names.length, answer };
  }
  if (!best) throw new Error("This part of the run is not in this file.");
  return FILE_FILTERS[path] ? FILE_FILTERS[path](best.answer, parameters) : best.answer;
}

// ---- Addresses: #view/ID[,ID...][/STEP][?parameters] ----

function readAddress() {
  const [path, text = ""] = location.hash.slice(1).split("?");
  const [, view, list = "", step] = /^([a-z]*)\/?(.*?)(?:\/(\d+))?$/.exec(path) || [];
  const ids = list.split(",").filter(Boolean).map(decodeURIComponent);
  const params = Object.fromEntries(new URLSearchParams(text));
  if (!VIEWS[view] || (view !== "runs" && !ids.length)) return { view: "runs", ids: [], params };
  return { view, ids, id: ids[0], step: step && Number(step), params };
}

function address(view, ids, step, params = {}) {
  const path = [view, [ids ?? []].flat().map(encodeURIComponent).join(","), step].filter((part) => part || part === 0);
  const text = query(params).toString();
  return `#${path.join("/")}${text && `?${text}`}`;
}

/** Change parameters of the address, which shows the view again; "" removes one. */
function change(params) {
  const { view, ids, step, params: current } = readAddress();
  location.replace(address(view, ids, step, { ...current, ...params }));
}

// ---- Showing a view ----

const content = document.getElementById("content");
let route = { view: "", ids: [], params: {} };
let [showing, shownAt] = [0, 0];

/** Show the view of the address: another one replaces the content, the same one is updated in place. */
async function show() {
  const token = (showing += 1);
  const next = { ...readAddress(), error: "" };
  const place = ({ view, ids, step }) => JSON.stringify([view, ids, step]);
  const isUpdate = shownAt > 0 && place(route) === place(next);
  route = next;
  content.setAttribute("aria-busy", "true");
  let nodes = null;
  try {
    next.runs = await Promise.all(next.ids.map((id) => ask("api/run", { id })));
    [next.run] = next.runs;
    nodes = [await VIEWS[next.view](next)].flat(Infinity).filter(isPresent);
  } catch (error) {
    next.error = error.message;
    if (!isUpdate) nodes = [title("Nothing to show"), failure(error)];
  }
  if (token !== showing) return;
  if (isUpdate && nodes) morph(content, h("main", { id: "content", tabindex: "-1" }, nodes));
  else if (nodes) content.replaceChildren(...nodes);
  content.removeAttribute("aria-busy");
  if (!isUpdate) window.scrollTo(0, 0);
  if (!isUpdate && shownAt) content.querySelector("h1")?.focus({ preventScroll: true });
  shownAt = performance.now();
  showHeader(next);
  connect();
}

function failure({ message }) {
  const again = !isFile && h("button", { onclick: show }, "Try again");
  return h("div", { class: "state error", role: "alert" }, h("p", null, message), again);
}

const stepText = (run) => `${number(run.step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}`;

function showHeader({ view, ids, run, runs, step, error }) {
  const names = (runs || []).map((each) => each.name || each.id).join(", ");
  document.title = [TABS[view] || "Runs", step, names, "DLRover RL"].filter(Boolean).join(" · ");
  const status = run && ids.length === 1 && [badge(run.phase), quiet(`step ${stepText(run)}`)];
  const name = run && h("span", { class: "name" }, ids.length > 1 ? `${ids.length} runs` : names);
  morph(document.getElementById("run"), h("div", { id: "run" }, name, status));
  const tabs = run ? Object.entries(TABS).filter(([key]) => key === "curves" || ids.length === 1) : [];
  const links = tabs.map(([key, text]) => link(text, address(key, ids), { "aria-current": key === view && "page" }));
  const frame = { id: "views", "aria-label": "Views of the run", hidden: !run };
  morph(document.getElementById("views"), h("nav", frame, links));
  if (error) showConnection("lost", error);
}

function showConnection(kind, text = "") {
  const words = { live: "● live", lost: "✕ no answer", file: "exported file", ended: "" }[kind];
  const frame = { class: kind, id: "connection", role: "status", title: text };
  morph(document.getElementById("connection"), h("div", frame, words));
}

// ---- Live updates ----

let streams = [];
let [streamKey, refreshTimer] = ["", 0];

/** Show the view again soon, at most once in a second. */
function refresh() {
  if (refreshTimer || document.hidden) return;
  refreshTimer = setTimeout(() => {
    refreshTimer = 0;
    show();
  }, Math.max(50, shownAt + 1000 - performance.now()));
}

/** Follow up to three runs of the view, as browsers allow six connections to a server; a hidden page follows none. */
function connect() {
  if (isFile) return showConnection("file", `written ${localTime(now())}`);
  const ids = route.ids.filter((_, at) => route.runs?.[at] && !ENDED.has(route.runs[at].phase)).slice(0, 3);
  if (!ids.length && !route.error) showConnection("ended");
  const key = document.hidden ? "" : JSON.stringify(ids);
  if (!route.error && streams.some((stream) => stream.readyState === EventSource.OPEN)) showConnection("live");
  if (key === streamKey) return undefined;
  streams.forEach((stream) => stream.close());
  streamKey = key;
  streams = (key ? ids : []).map((id) => {
    const stream = new EventSource(`api/stream?${query({ id })}`);
    stream.addEventListener("change", refresh);
    stream.onopen = () => showConnection("live");
    stream.onerror = () => showConnection("lost", "The connection is being opened again.");
    return stream;
  });
  return undefined;
}

/** Each second: let ages rise, and ask for what no stream reports, the list of runs and the lines of logs. */
function poll(second) {
  if (document.hidden || isFile) return;
  for (const each of document.querySelectorAll("time[data-at]")) each.textContent = ageText(Number(each.dataset.at));
  const isLive = route.runs?.some((run) => !ENDED.has(run.phase));
  if ((route.view === "runs" && second % 5 === 0) || (route.view === "events" && isLive && second % 2 === 0)) refresh();
}

// ---- Text at the pointer ----

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text || "";
  const top = y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 16;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${top}px`;
}

function tipOf({ target, clientX, clientY }) {
  if (!target.closest?.(".plot")) showTip(target.closest?.("[data-tip]")?.dataset.tip, clientX, clientY);
}

// ---- Start ----

async function start() {
  const line = h("path", { d: "M0 6 L6 0", stroke: "currentColor" });
  const pattern = h("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line);
  document.body.append(h("svg", { class: "defs", "aria-hidden": "true" }, h("defs", null, pattern)));
  document.querySelector(".skip").onclick = (event) => {
    event.preventDefault();
    content.focus();
  };
  document.addEventListener("pointermove", tipOf);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && showTip(""));
  document.addEventListener("visibilitychange", () => (document.hidden ? connect() : show()));
  window.addEventListener("hashchange", show);
  let seconds = 0;
  setInterval(() => poll((seconds += 1)), 1000);
  const { runs = [] } = location.hash ? {} : await ask("api/runs").catch(() => ({}));
  if (runs.length === 1) location.replace(address("run", runs[0].id));
  else show();
}

document.addEventListener("DOMContentLoaded", start);
