// SPDX-License-Identifier: Apache-2.0
// The views of one step, of samples, of evaluations, and of events and logs.
"use strict";

// ---- Step ----

const methodColours = new Map();

/** One of eight classes, the same for a method in all steps that are shown. */
function methodClass(name) {
  if (!methodColours.has(name)) methodColours.set(name, (methodColours.size % 8) + 1);
  return `series-${methodColours.get(name)}`;
}

/** Links to the steps beside `step`, and a field for any. */
function stepTools(view, { id, run, step, params }, first, last, ...tools) {
  const go = (to) => address(view, id, to, { ...params, offset: "" });
  const beside = (text, to) => (to >= first && to <= last ? link(text, go(to), { class: "button" }) : h("span", { class: "button off", "aria-disabled": "true" }, text));
  const input = h("input", { type: "number", min: first, max: last, value: String(step), onchange: ({ target }) => (location.hash = go(target.value)) });
  return h("div", { class: "tools" }, beside("← Previous", step - 1), field("Step", input), beside("Next →", step + 1),
    run.step > step && link("Last step", go(Math.min(last, run.step)), { class: "button" }), tools);
}

const spanClass = ({ kind, label }) => (kind === "call" ? methodClass(label) : `span-${kind}`);

function lane({ process, spans }, total) {
  const boxes = spans.map((span) => {
    const size = span.end_s - span.begin_s;
    const phases = Object.entries(span.phases || {}).map(([name, seconds]) => `\n  ${name}: ${duration(seconds)}`).join("");
    const tipText = `${process}: ${span.label}, ${duration(size)}${span.cause ? ` (${span.cause})` : ""}${phases}`;
    const width = (100 * size) / total;
    const box = h("rect", { width: "100%", height: "100%", class: spanClass(span) });
    const text = width > 5 && h("text", { x: 4, y: 15, class: span.kind }, span.label);
    return h("svg", { x: `${(100 * span.begin_s) / total}%`, width: `${width}%`, height: 22, "data-tip": tipText }, box, span.kind !== "call" && hatch(), text);
  });
  const label = `${process}: ${spans.length} spans; the table below has their times`;
  return h("div", { class: "lane", "data-key": process }, h("div", { class: "lane-name" }, process),
    h("svg", { width: "100%", height: 22, role: "img", "aria-label": label }, boxes));
}

function lanes({ lanes: all = [], total_s: total, step }) {
  if (!all.length) return note("This step has no spans: they were off (spans_mb: 0), or the file has dropped them.");
  const end = Math.max(total, ...all.flatMap(({ spans }) => spans.map((span) => span.end_s)));
  const marks = [0, 1, 2, 3, 4].map((part) => h("span", null, duration((end * part) / 4)));
  const rows = all.flatMap(({ process, spans }) => spans.map((span) => ({ process, ...span })));
  const columns = [
    { name: "Process", cell: ({ process }) => process }, { name: "Begin", number: true, cell: (row) => duration(row.begin_s) },
    { name: "Time", number: true, cell: (row) => duration(row.end_s - row.begin_s) }, { name: "What", cell: ({ label }) => label },
    { name: "Cause", cell: ({ cause }) => cause || "–" },
  ];
  const labels = [...new Map(rows.map((row) => [row.kind === "call" ? row.label : row.kind, row])).entries()];
  const words = { wait: "waits", down: "is being replaced" };
  const keys = labels.map(([text, row]) => h("li", null, sample(spanClass(row), row.kind !== "call"), ` ${words[text] || text}`));
  return [h("ul", { class: "legend" }, keys), h("div", { class: "lanes" }, h("div", { class: "lane axis quiet" }, h("div"), h("div", { class: "ends" }, marks)),
    all.map((each) => lane(each, end))), fold(`spans-${step}`, `All ${rows.length} spans`, () => table("Spans of the step", columns, rows, { quiet: true }))];
}

VIEWS.step = async (shown) => {
  const { id, run } = shown;
  shown.step = shown.step ?? run.step;
  if (!run.step) return [h("h1", { tabindex: "-1" }, "Step"), note("No step has ended yet; the first appears here.")];
  const answer = await ask("api/step", { id, step: shown.step }).catch((error) => ({ step: shown.step, error }));
  const head = [h("h1", { tabindex: "-1" }, `Step ${shown.step}`), stepTools("step", shown, 0, run.step,
    link("Samples", address("samples", id, shown.step), { class: "button" }),
    !isFile && link("Perfetto trace", `api/trace?${new URLSearchParams({ id, steps: `${shown.step}:${shown.step}` })}`, { class: "button", download: "", title: "Opens at ui.perfetto.dev" }))];
  if (answer.error) return [head, failure(answer.error)];
  const { parts, total_s: total, findings = [], metrics } = answer;
  const segments = parts.map(({ name, seconds }) => ({ label: name, size: seconds, tip: `${name}: ${duration(seconds)}, ${percent(seconds / total)}`, class: methodClass(name) }));
  const columns = [{ name: "Part", cell: ({ name }) => [sample(methodClass(name)), ` ${name}`] },
    { name: "Time", number: true, cell: ({ seconds }) => duration(seconds) }, { name: "Share", number: true, cell: ({ seconds }) => percent(seconds / total) }];
  const callouts = findings.map((each) => h("div", { class: "callout bad" }, h("p", null, h("strong", null, each.sentence), ` It cost ${duration(each.cost_s)}.`), each.remedy && h("p", null, each.remedy)));
  const values = Object.entries(metrics).map(([name, value]) => ({ name, value }));
  return [head, h("p", { class: "quiet" }, `${duration(total)} from ${answer.began_s ? localTime(answer.began_s) : "an unknown time"}`),
    callouts.length ? callouts : h("p", { class: "callout good" }, "✓ No worker stands out in this step."),
    h("section", null, h("h2", null, "Parts of the step"), parts.length ? [bar("Parts of the step; the numbers are in the table below.", segments), table("Parts of the step", columns, parts, { quiet: true })] : note("This step has no times.")),
    h("section", null, h("h2", null, "Workers"), lanes(answer)),
    h("section", null, h("h2", null, "Metrics"), table("Metrics of the step", [{ name: "Metric", cell: ({ name }) => name },
      { name: "Value", number: true, cell: ({ value }) => (value === null ? "–" : String(value)) }], values, { quiet: true }))];
};

// ---- Samples ----

const TURN = /<\|im_start\|>(\w+)\n?|<\|im_end\|>\n?|<(tool_call|tool_response|think)>|<\/(?:tool_call|tool_response|think)>/g;

/** The turns of a text that has chat marks: pairs of a speaker ("" for text outside them) and its words. */
function turnsOf(text) {
  const turns = [];
  let [speaker, at] = ["", 0];
  for (const match of [...text.matchAll(TURN), { index: text.length, 0: "" }]) {
    const words = text.slice(at, match.index);
    if (words.trim()) turns.push([speaker, words]);
    speaker = match[1] || match[2]?.replace("_", " ") || "";
    at = match.index + match[0].length;
  }
  return turns;
}

function texts(text) {
  const turns = turnsOf(text || "");
  if (turns.length < 2) return h("pre", { class: "words" }, text || "(empty)");
  return turns.map(([speaker, words]) => h("div", { class: `turn ${speaker.replace(" ", "-")}` }, h("div", { class: "speaker" }, speaker || "text"), h("pre", { class: "words" }, words.trim())));
}

const TOKEN_VALUES = {
  advantage: (row) => row.token_advantages, "log-prob": (row) => row.token_logprobs,
  mismatch: (row) => row.token_old_logprobs && row.token_logprobs?.map((value, index) => row.token_old_logprobs[index] - value),
};

/** The tokens on nine colours, from the lowest to the highest value around 0. */
function tokens(row, kind) {
  const values = TOKEN_VALUES[kind](row);
  if (!values) return note(`This sample has no ${kind} of its tokens.`);
  const most = Math.max(...values.map(Math.abs), 1e-12);
  const level = (value) => Math.round((4 * value) / most);
  const spans = row.tokens.map((token, index) => h("span", { class: `token level${level(values[index])}`, "data-tip": `${JSON.stringify(token)} ${kind} ${number(values[index])}` }, token));
  const steps = [-4, -2, 0, 2, 4].filter((step) => step <= 0 || kind !== "log-prob");
  const keys = steps.map((step) => h("li", null, h("span", { class: `token level${step}` }, number((most * step) / 4))));
  const rows = row.tokens.map((token, index) => ({ token, value: values[index] }));
  const columns = [{ name: "Token", kind: "code", cell: ({ token }) => JSON.stringify(token) }, { name: kind, number: true, cell: ({ value }) => number(value) }];
  return [h("ul", { class: "legend" }, h("li", null, kind), keys), h("p", { class: "words tokens" }, spans),
    fold(`tokens-${sampleKey(row)}`, "Values of the tokens", () => table("Tokens", columns, rows, { quiet: true }))];
}

const sampleKey = (row) => [row.step, row.set, row.prompt_id, row.sample_index, row.retry, row.trajectory].join("-");
const LINEAGE = ["version", "min_version", "staleness", "retry", "trajectory", "rank", "update", "micro_batch", "prompt_tokens", "completion_tokens", "turns"];

function sampleBody(row, params) {
  const names = [...LINEAGE, ...Object.keys(row).filter((name) => name.startsWith("reward/"))].filter((name) => row[name] !== undefined && row[name] !== null);
  const kind = params.colour || "advantage";
  return [h("dl", { class: "facts small" }, names.map((name) => fact(name, number(row[name])))),
    h("h4", null, "Prompt"), texts(row.prompt), h("h4", null, "Completion"), row.tokens ? tokens(row, kind) : null, (!row.tokens || turnsOf(row.completion || "").length > 1) && texts(row.completion),
    row.answer && [h("h4", null, "Answer"), h("pre", { class: "words" }, row.answer)]];
}

function verdict(row) {
  const text = row.error || [row.mark, row.reason].filter(Boolean).join(": ");
  return text ? h("span", { class: row.error ? "error" : "marked", title: text }, row.error ? "✕ " : "◌ ", text) : "trained";
}

const brief = (text) => h("span", { class: "brief" }, (text || "").slice(0, 300));

function sampleList(rows, { id, step, params }) {
  const tokensOf = (row) => number(row.completion_tokens);
  const head = h("div", { class: "sample-row head", "aria-hidden": "true" }, ["Prompt", "Reward", "Advantage", "Tokens", "Use", "Completion"].map((name) => h("span", null, name)));
  return [head, rows.map((row) => fold(`sample-${sampleKey(row)}`, h("span", { class: "sample-row" },
    h("span", null, h("span", { class: "unseen" }, "prompt "), `${row.prompt_id}·${row.sample_index ?? 0}`), h("span", null, h("span", { class: "unseen" }, "reward "), number(row.reward)),
    h("span", null, h("span", { class: "unseen" }, "advantage "), number(row.advantage)), h("span", null, tokensOf(row), h("span", { class: "unseen" }, " tokens")), verdict(row), brief(row.completion)),
  () => [link("All samples of this prompt", address("samples", id, step, { ...params, prompt: row.prompt_id, offset: "" })), sampleBody(row, params)], { class: "sample-card" }))];
}

function groupOf(rows, params) {
  const cards = rows.map((row) => h("li", { "data-key": sampleKey(row) }, h("dl", { class: "facts small" }, fact("reward", number(row.reward)), fact("advantage", number(row.advantage)),
    fact("tokens", number(row.completion_tokens)), fact("use", verdict(row))), row.tokens ? tokens(row, params.colour || "advantage") : texts(row.completion),
  fold(`more-${sampleKey(row)}`, "Lineage", () => sampleBody(row, params))));
  return [h("h2", null, `Prompt ${rows[0].prompt_id}`), texts(rows[0].prompt), rows[0].answer && h("p", { class: "quiet" }, "answer ", h("code", null, rows[0].answer)),
    h("ul", { class: "side", tabindex: "0", "aria-label": "Samples of the prompt, side by side" }, cards)];
}

const SAMPLES_PER_PAGE = 50;

VIEWS.samples = async (shown) => {
  const { id, run, params } = shown;
  const title = h("h1", { tabindex: "-1" }, "Samples");
  shown.step = shown.step ?? run.step;
  const query = { sort: "reward", order: "asc", ...params, offset: params.offset || 0, limit: SAMPLES_PER_PAGE };
  const answer = await ask("api/samples", { id, step: shown.step, ...query, colour: "" }).catch((error) => ({ error }));
  if (answer.error) return [title, stepTools("samples", shown, 0, run.step), failure(answer.error)];
  const { rows, total, first, last } = answer;
  const [from, hasTokens] = [Number(query.offset), rows.some((row) => row.tokens)];
  const tools = h("div", { class: "tools" },
    select("Sort by", query.sort, { reward: "reward", length: "length", error: "error", prompt: "prompt" }, (sort) => change({ sort, offset: "" })),
    select("Order", query.order, { asc: "lowest first", desc: "highest first" }, (order) => change({ order, offset: "" })),
    search("Search texts", params.q, (q) => change({ q, offset: "" })),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: Boolean(params.errors), onchange: ({ target }) => change({ errors: target.checked ? 1 : "", offset: "" }) }), " Errors only"),
    hasTokens && select("Colour tokens by", params.colour || "advantage", { advantage: "advantage", "log-prob": "log-prob", mismatch: "mismatch of log-probs" }, (colour) => change({ colour })),
    params.prompt && h("button", { onclick: () => change({ prompt: "" }) }, "All prompts"));
  const page = (text, offset, isOff) => h("button", { disabled: isOff, onclick: () => change({ offset }) }, text);
  const pages = total > rows.length && h("div", { class: "tools" }, page("← Previous", Math.max(0, from - SAMPLES_PER_PAGE) || "", from <= 0), page("Next →", from + SAMPLES_PER_PAGE, from + rows.length >= total));
  const count = h("p", { class: "quiet" }, rows.length ? `${from + 1} to ${from + rows.length} of ${number(total)} samples` : "");
  const empty = note(params.q || params.errors ? "No sample of this step matches." : `Step ${shown.step} has no samples in the run's folder; steps ${first} to ${last} have.`);
  return [title, stepTools("samples", shown, first ?? 0, last ?? run.step, link("This step", address("step", id, shown.step), { class: "button" })), tools, count,
    rows.length ? (params.prompt !== undefined ? groupOf(rows, params) : sampleList(rows, shown)) : empty, pages];
};

FILE_FILTERS["api/samples"] = (answer, { sort = "reward", order = "asc", q = "", prompt, errors, offset = 0, limit = SAMPLES_PER_PAGE }) => {
  const keys = { reward: "reward", length: "completion_tokens", error: "error", prompt: "prompt_id" };
  const has = (row) => [row.prompt, row.completion, row.answer].join("\n").toLowerCase().includes(q.toLowerCase());
  const rows = answer.rows.filter((row) => has(row) && (!errors || row.error) && (prompt === undefined || String(row.prompt_id) === prompt));
  rows.sort((left, right) => (order === "asc" ? 1 : -1) * compareRows(left[keys[sort]], right[keys[sort]]));
  return { ...answer, total: rows.length, rows: rows.slice(Number(offset), Number(offset) + limit) };
};

// ---- Evaluations ----

VIEWS.evaluations = async ({ id, params }) => {
  const title = h("h1", { tabindex: "-1" }, "Evaluations");
  const { steps, prompts } = await ask("api/evaluations", { id });
  if (!steps.length) return [title, note("The run has not been evaluated yet, or keeps no answers of its evaluations.")];
  const text = (params.q || "").toLowerCase();
  const matching = prompts.filter(({ prompt }) => prompt.toLowerCase().includes(text)).slice(0, 200);
  const chosen = params.prompt ?? String((matching[0] || prompts[0]).prompt_id);
  const items = matching.map(({ prompt_id: key, prompt }) => h("li", { "data-key": String(key) }, link(prompt || `prompt ${key}`, address("evaluations", id, undefined, { ...params, prompt: key }), { "aria-current": String(key) === chosen && "true" })));
  const { answers = [] } = await ask("api/evaluations", { id, prompt: chosen });
  const rows = answers.flatMap(({ step, rows: own }) => own.filter((row) => String(row.prompt_id) === chosen).map((row) => ({ ...row, step })));
  const columns = [{ name: "Step", number: true, cell: ({ step }) => (step > 0 ? link(number(step), address("step", id, step)) : "before") },
    { name: "Reward", number: true, cell: (row) => number(row.reward ?? row.score) }, { name: "Answer of the model", kind: "text", cell: (row) => [row.error && h("p", { class: "error" }, `✕ ${row.error}`), texts(row.completion)] }];
  const answer = rows.find((row) => row.answer)?.answer;
  return [title, h("p", { class: "quiet" }, `${steps.length} evaluations of ${prompts.length} held-out prompts, at steps ${steps[0]} to ${steps.at(-1)}`),
    h("div", { class: "split" }, h("details", { class: "picker", open: innerWidth > 900 }, h("summary", null, "Held-out prompts"), search("Search", params.q, (q) => change({ q })), h("ul", { class: "prompts" }, items)),
      h("div", null, h("h2", null, "Prompt"), texts(rows[0]?.prompt ?? prompts.find(({ prompt_id: key }) => String(key) === chosen)?.prompt), answer && h("p", null, "Right answer: ", h("code", null, answer)),
        rows.length ? table("Answers over all evaluations", columns, rows) : note("This prompt has no answers.")))];
};

// ---- Events and logs ----

let stream = { key: "", events: [], next: "" };
const KEPT_EVENTS = 5000;

/** The stream follows the end of its box unless you scroll up, or turn "Follow" off. */
VIEWS.events = async ({ id, params }) => {
  const query = { id, q: params.q, process: params.process };
  const key = JSON.stringify(query);
  if (stream.key !== key) stream = { key, events: [], next: "" };
  const current = stream;
  const answer = await ask("api/events", { ...query, after: current.next, limit: 500 });
  if (answer.next !== current.next || !current.events.length) current.events = [...current.events, ...answer.events].slice(-KEPT_EVENTS);
  current.next = answer.next;
  const follows = params.follow !== "off";
  const tools = h("div", { class: "tools" }, search("Search", params.q, (q) => change({ q })),
    select("Process", params.process || "", { "": "all processes", ...Object.fromEntries(answer.processes.map((name) => [name, name])) }, (process) => change({ process })),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: follows, onchange: ({ target }) => change({ follow: target.checked ? "" : "off" }) }), " Follow"));
  const lines = current.events.map((each) => h("li", { class: `${each.kind} ${(each.level || "").toLowerCase()}` }, h("time", null, localTime(each.at_s)), h("span", { class: "who" }, each.process || "master"),
    h("span", { class: "level" }, each.kind === "event" ? "◆ event" : each.level || ""), h("span", { class: "line" }, each.text)));
  const box = h("ol", { class: "log", tabindex: "0", "aria-label": "Events and lines of logs, oldest first" }, lines);
  requestAnimationFrame(() => {
    const shown = document.querySelector("ol.log");
    if (shown && follows) shown.scrollTop = shown.scrollHeight;
  });
  return [h("h1", { tabindex: "-1" }, "Events and logs"), tools, lines.length ? box : note(params.q || params.process ? "No line matches." : "There is no event yet.")];
};

FILE_FILTERS["api/events"] = (answer, { q = "", process, after }) => {
  const has = (each) => `${each.process} ${each.text}`.toLowerCase().includes(q.toLowerCase()) && (!process || each.process === process);
  return { ...answer, events: after ? [] : answer.events.filter(has), next: "end" };
};
