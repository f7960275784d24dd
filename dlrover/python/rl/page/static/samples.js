// SPDX-License-Identifier: Apache-2.0
// The samples of a step, the samples of a prompt side by side, and held-out prompts over all evaluations.
"use strict";

const SAMPLES_PER_PAGE = 50;
const TURN = /<\|im_start\|>(\w+)\n?|<\|im_end\|>\n?|<(tool_call|tool_response|think)>|<\/(?:tool_\w+|think)>/g;
const LINEAGE = [
  "set", "version", "min_version", "staleness", "retry", "trajectory", "rank", "update", "turns",
  "prompt_tokens", "completion_tokens", "score",
];
const SORTS = { reward: "reward", length: "length", error: "error", prompt: "prompt" };
const COLOURINGS = { advantage: "advantage", logprob: "log-prob of the rollout", mismatch: "mismatch of log-probs" };

/** The turns of a text with chat marks: pairs of a speaker, "" outside the marks, and its words. */
function turnsOf(text) {
  const turns = [];
  let [speaker, at] = ["", 0];
  for (const match of [...text.matchAll(TURN), { index: text.length, 0: "" }]) {
    const words = text.slice(at, match.index).trim();
    if (words) turns.push([speaker, words]);
    speaker = match[1] || match[2] || "";
    at = match.index + match[0].length;
  }
  return turns;
}

function texts(text) {
  const turns = turnsOf(text || "");
  if (turns.length < 2) return h("pre", { class: "words" }, text || "(empty)");
  return turns.map(([speaker, words]) => h("div", { class: `turn ${speaker}` },
    h("div", { class: "speaker" }, speaker.replace("_", " ") || "text"), h("pre", { class: "words" }, words)));
}

function tokenValues(row, kind) {
  const { token_logprobs: rollout, token_old_logprobs: trainer, token_advantages: advantages } = row;
  if (kind === "advantage") return advantages;
  if (kind === "logprob") return rollout;
  return rollout && trainer && rollout.map((value, at) => trainer[at] - value);
}

/** The tokens on nine backgrounds, from the least value below zero to the greatest above it. */
function tokens(row, kind) {
  const values = tokenValues(row, kind);
  if (!values) return [note(`This sample has no ${COLOURINGS[kind]} of its tokens.`), texts(row.completion)];
  const most = Math.max(...values.map((value) => Math.abs(value || 0))) || 1;
  const level = (value) => `token level${Math.round((4 * (value || 0)) / most)}`;
  const text = (token, at) => `${JSON.stringify(token)}\n${COLOURINGS[kind]} ${number(values[at])}`;
  const token = (each, at) => h("span", { class: level(values[at]), "data-tip": text(each, at) }, each);
  const steps = [-1, -0.5, 0, 0.5, 1].filter((part) => part <= 0 || kind !== "logprob");
  const keys = steps.map((part) => h("li", { class: level(most * part) }, number(most * part)));
  const columns = [["Token", (at) => JSON.stringify(row.tokens[at]), "code"],
    [COLOURINGS[kind], (at) => number(values[at]), "number"]];
  const all = () => table("Tokens", columns, [...row.tokens.keys()]);
  return [h("ul", { class: "legend" }, h("li", null, COLOURINGS[kind]), keys),
    h("p", { class: "words tokens" }, row.tokens.map(token)), fold(`tokens-${sampleKey(row)}`, "Their values", all)];
}

const sampleKey = (row) =>
  [row.step, row.set, row.prompt_id, row.sample_index, row.retry, row.trajectory].map((part) => part ?? "").join("-");

/** The tokens, and the text too if it has turns: the tokens are only those of the policy. */
function completion(row, params) {
  if (!row.tokens) return texts(row.completion);
  const turns = (row.turns > 1 || turnsOf(row.completion || "").length > 1) && texts(row.completion);
  return [tokens(row, params.colour || "advantage"), turns];
}

function verdict({ error, mark, reason }) {
  const text = error || [mark, reason].filter(Boolean).join(": ");
  if (!text) return "trained";
  return h("span", { class: error ? "error" : "marked", title: text }, error ? "✕ " : "◌ ", text);
}

function lineage(row) {
  const functions = Object.keys(row).filter((name) => name.startsWith("reward/"));
  const names = [...LINEAGE, ...functions].filter((name) => isPresent(row[name]));
  return h("dl", { class: "facts small" }, names.map((name) => fact(name.replace("_", " "), number(row[name]))));
}

function sampleList(rows, { id, step, params }) {
  const part = (label, value) => h("span", null, unseen(`${label} `), value);
  const head = ["Prompt", "Reward", "Advantage", "Tokens", "Use", "Completion"].map((name) => h("span", null, name));
  const cards = rows.map((row) => {
    const group = address("samples", id, step, { ...params, prompt: row.prompt_id, offset: "" });
    const summary = h("span", { class: "sample-row" }, part("prompt", `${row.prompt_id} · ${row.sample_index ?? 0}`),
      part("reward", number(row.reward)), part("advantage", number(row.advantage)),
      part("tokens", number(row.completion_tokens)), h("span", null, verdict(row)),
      h("span", { class: "brief" }, (row.completion || "").slice(0, 300)));
    const body = () => [link("All samples of this prompt, side by side", group), lineage(row), h("h3", null, "Prompt"),
      texts(row.prompt), h("h3", null, "Completion"), completion(row, params),
      row.error && [h("h3", null, "Error"), h("pre", { class: "words error" }, row.error)],
      row.answer && [h("h3", null, "Answer"), h("pre", { class: "words" }, row.answer)]];
    return fold(`sample-${sampleKey(row)}`, summary, body, "sample-card");
  });
  return h("div", { class: "cards" }, h("div", { class: "sample-row head", "aria-hidden": "true" }, head), cards);
}

const rightAnswer = (text) => text && h("p", null, quiet("Answer: "), h("code", null, text));

function group(rows, params) {
  const cards = rows.map((row) => {
    const facts = [fact("reward", number(row.reward)), fact("advantage", number(row.advantage)),
      fact("tokens", number(row.completion_tokens)), fact("use", verdict(row))];
    return h("li", { "data-key": sampleKey(row) }, h("h3", null, `Sample ${row.sample_index ?? 0}`),
      h("dl", { class: "facts small" }, facts), completion(row, params),
      fold(`more-${sampleKey(row)}`, "Lineage", () => lineage(row)));
  });
  const [{ prompt_id: prompt, prompt: text, answer }] = rows;
  return [h("h2", null, `Prompt ${prompt}`), texts(text), rightAnswer(answer),
    h("ul", { class: "side", tabindex: "0", "aria-label": "Samples of the prompt, side by side" }, cards)];
}

function sampleTools(params, hasTokens) {
  const set = (name) => (value) => change({ [name]: value, offset: "" });
  return h("div", { class: "tools" },
    select("Sort by", params.sort || "reward", SORTS, set("sort")),
    select("Order", params.order || "asc", { asc: "lowest first", desc: "highest first" }, set("order")),
    search("Search texts", params.q, set("q")),
    check("Errors only", Boolean(params.errors), (isOn) => set("errors")(isOn ? 1 : "")),
    hasTokens && select("Colour tokens by", params.colour || "advantage", COLOURINGS, (colour) => change({ colour })),
    isPresent(params.prompt) && h("button", { onclick: () => set("prompt")("") }, "All prompts"));
}

VIEWS.samples = async (shown) => {
  const { id, run, params } = shown;
  const { colour, ...chosen } = params;
  const sent = { sort: "reward", order: "asc", ...chosen, limit: SAMPLES_PER_PAGE };
  const answer = await ask("api/samples", { id, step: shown.step, ...sent }).catch((error) => ({ error }));
  shown.step ??= answer.step ?? run.step;
  const step = link("This step", address("step", id, shown.step), { class: "button" });
  const tools = stepTools(shown, answer.first ?? 1, answer.last ?? run.step, step);
  const head = [title(`Samples of step ${shown.step}`), tools];
  if (answer.error) return [head, failure(answer.error)];
  const { rows, total, first, last } = answer;
  const from = Number(params.offset || 0);
  const page = (text, offset, disabled) => h("button", { disabled, onclick: () => change({ offset }) }, text);
  const pages = total > rows.length && h("div", { class: "tools" },
    page("← Previous samples", Math.max(0, from - SAMPLES_PER_PAGE) || "", from <= 0),
    page("Next samples →", from + SAMPLES_PER_PAGE, from + rows.length >= total));
  const isNarrowed = params.q || params.errors || params.prompt;
  const empty = isNarrowed ? "No sample of this step matches."
    : `Step ${shown.step} has no samples; steps ${first} to ${last} have.`;
  const list = isPresent(params.prompt) ? group : sampleList;
  return [head, sampleTools(params, rows.some((row) => row.tokens)),
    rows.length > 0 && h("p", { class: "quiet" }, `${from + 1} to ${from + rows.length} of ${number(total)} samples`),
    rows.length ? (list === group ? group(rows, params) : sampleList(rows, shown)) : note(empty), pages];
};

FILE_FILTERS["api/samples"] = (answer, { sort, order, q = "", prompt, errors, offset = 0, limit }) => {
  const key = { length: "completion_tokens", error: "error", prompt: "prompt_id" }[sort] || "reward";
  const words = (row) => [row.prompt, row.completion, row.answer].join("\n").toLowerCase();
  const isChosen = (row) => words(row).includes(q.toLowerCase()) && (!errors || row.error)
    && (prompt === undefined || String(row.prompt_id) === prompt);
  const rows = sorted(answer.rows.filter(isChosen), (row) => row[key], order);
  return { ...answer, total: rows.length, rows: rows.slice(Number(offset), Number(offset) + Number(limit)) };
};

// ---- Evaluations ----

function answersTable(answers, prompt, id) {
  const rows = answers.flatMap(({ step, rows: all }) =>
    all.filter((row) => String(row.prompt_id) === prompt).map((row) => ({ ...row, step })));
  const columns = [
    ["Step", ({ step }) => (step > 0 ? link(number(step), address("step", id, step)) : "before"), "number"],
    ["Reward", (row) => number(row.reward ?? row.score), "number"],
    ["Completion", ({ error, completion: text }) => [error && h("p", { class: "error" }, error), texts(text)], "text"],
  ];
  const right = rows.find((row) => row.answer)?.answer;
  return [rightAnswer(right),
    rows.length ? table("Answers over all evaluations", columns, rows) : note("This prompt has no answers.")];
}

VIEWS.evaluations = async ({ id, params }) => {
  const { steps, prompts } = await ask("api/evaluations", { id });
  if (!steps.length) return [title("Evaluations"), note("The run has no answers of evaluations yet.")];
  const text = (params.q || "").toLowerCase();
  const matching = prompts.filter(({ prompt }) => prompt.toLowerCase().includes(text)).slice(0, 200);
  const chosen = params.prompt ?? String((matching[0] || prompts[0]).prompt_id);
  const items = matching.map(({ prompt_id: key, prompt }) => {
    const current = String(key) === chosen && "true";
    const target = address("evaluations", id, undefined, { ...params, prompt: key });
    return h("li", { "data-key": String(key) }, link(prompt || `prompt ${key}`, target, { "aria-current": current }));
  });
  const { answers } = await ask("api/evaluations", { id, prompt: chosen });
  const question = prompts.find(({ prompt_id: key }) => String(key) === chosen)?.prompt;
  const list = h("details", { class: "picker", open: innerWidth > 900 }, h("summary", null, "Held-out prompts"),
    search("Search", params.q, (q) => change({ q })),
    items.length ? h("ul", { class: "prompts" }, items) : note("No prompt matches."));
  const times = `${steps.length} evaluations of ${prompts.length} held-out prompts, at steps ${steps.join(", ")}`;
  const answer = h("div", null, h("h2", null, "Prompt"), texts(question), answersTable(answers, chosen, id));
  return [title("Evaluations"), h("p", { class: "quiet" }, times), h("div", { class: "split" }, list, answer)];
};
