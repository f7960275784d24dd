// SPDX-License-Identifier: Apache-2.0
// The curves of one run or several: choice of metrics, charts by uPlot, marks of recoveries, settings that differ.
"use strict";

const FIRST_METRICS = [
  "reward/mean", "eval/accuracy", "eval/reward", "loss", "time/step", "completions/length_mean", "policy/entropy",
  "policy/kl", "grad_norm",
];
const MARK_SIGNS = { recovery: "▼", restart: "■", resize: "◆", resume: "▶" };
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;
const CHART_HEIGHT = 200;

const isDark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (index) => (index % COLOURS) + 1;
const dashOf = (index, count) => DASHES[count > 1 ? index % DASHES.length : 0];

/** The exponential moving average without the bias of its first values; absent values stay absent. */
function smooth(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** The lines of a chart: "main" ones, and thin ones of repeated steps and of values before smoothing. */
function linesOf(name, runs, params) {
  const weight = Number(params.smooth || 0);
  const isShown = (value) => typeof value === "number" && (!params.log || value > 0);
  return runs.flatMap(({ run, curves }, index) => {
    const line = (source, kind, weigh) => {
      const values = (source?.series?.[name] || []).map((value) => (isShown(value) ? value : null));
      return { run, index, kind, steps: source?.step || [], values: weigh ? smooth(values, weight) : values };
    };
    const thin = [line(curves.superseded, "repeated"), ...(weight ? [line(curves, "raw")] : [])];
    return [...thin, line(curves, "main", weight > 0)].filter(({ values }) => values.some(isShown));
  });
}

const costText = ({ kind, cost_s: cost }) =>
  typeof cost === "number" ? duration(cost) : kind === "resume" ? "–" : "under way";

function markText(mark) {
  const words = [mark.process, mark.cause, mark.message].filter(Boolean).join(", ");
  return `${mark.kind} at step ${mark.step}${words && `: ${words}`}\ncost: ${costText(mark)}`;
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px sans-serif`;
  ctx.textAlign = "center";
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = css(`--mark-${mark.kind}`) || css("--text");
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(MARK_SIGNS[mark.kind] || "●", x, bbox.top - 3 * ratio);
  }
  ctx.restore();
}

/** Show the values of the step at the pointer, or of the last one, in the heading; and the marks at the pointer. */
function followPointer(plot, { lines, marks }, readout) {
  const { idx, left, top } = plot.cursor;
  const isInside = typeof idx === "number" && left >= 0;
  if (plot.over.matches(":hover")) {
    const near = isInside ? marks.filter((mark) => Math.abs(plot.valToPos(mark.step, "x") - left) < 6) : [];
    const box = plot.over.getBoundingClientRect();
    showTip(near.map(markText).join("\n"), box.left + left, box.top + top);
  }
  const at = isInside ? idx : plot.data[0].length - 1;
  const values = lines.flatMap(({ kind }, line) => (kind === "main" ? [plot.data[line + 1][at]] : []));
  readout.textContent = `step ${plot.data[0][at]}: ${values.map(number).join(" · ") || "–"}`;
}

function zoomTo(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const ends = [Math.floor(plot.posToVal(left, "x")), Math.ceil(plot.posToVal(left + width, "x"))];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (plot.over.matches(":hover")) change({ from: Math.max(0, ends[0]), to: ends[1] });
}

function makePlot(host, readout) {
  const { lines, isLog, data } = host.spec;
  const line = { stroke: css("--line"), width: 1 };
  const axis = { stroke: css("--quiet"), grid: line, ticks: line, font: "11px system-ui, sans-serif" };
  const series = lines.map(({ kind, index }) => ({
    stroke: css(`--series-${colourOf(index)}`), spanGaps: true,
    width: kind === "main" ? 1.75 : 1, alpha: { main: 1, raw: 0.35, repeated: 0.7 }[kind],
    dash: kind === "repeated" ? [2, 4] : dashOf(index, host.spec.count),
  }));
  const range = (_, least, most) => host.spec.zoom || (least === most ? [least - 1, most + 1] : [least, most]);
  const plot = new uPlot({
    width: host.clientWidth, height: CHART_HEIGHT, legend: { show: false }, padding: [16, 12, 0, 0],
    scales: { x: { time: false, range }, y: { distr: isLog ? 3 : 1 } },
    axes: [{ ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
    series: [{}, ...series],
    cursor: {
      sync: { key: "steps" }, drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => change({ from: "", to: "" }) },
    },
    hooks: {
      draw: [(each) => drawMarks(each, host.spec.marks)],
      setCursor: [(each) => followPointer(each, host.spec, readout)],
      setSelect: [zoomTo],
    },
  }, data, host);
  let downAt = 0;
  plot.over.onmousedown = ({ clientX }) => (downAt = clientX);
  plot.over.onmouseleave = () => showTip("");
  plot.over.onclick = ({ clientX }) => {
    const step = plot.data[0][plot.cursor.idx];
    if (Math.abs(clientX - downAt) < 4 && step > 0) location.hash = address("step", route.id, step);
  };
  followPointer(plot, host.spec, readout);
  return plot;
}

/** The element of a chart: it makes the plot once it has a width, and an update changes the data of the plot. */
function plotHost(spec, label, readout) {
  const host = h("div", { class: "plot", role: "img", "aria-label": label });
  const look = () => JSON.stringify([host.spec.isLog, host.spec.lines.map(({ run, kind }) => [run.id, kind])]);
  let [plot, made] = [null, ""];
  const build = () => {
    plot?.destroy();
    made = look();
    plot = makePlot(host, readout);
  };
  host.spec = spec;
  host.adopt = (fresh) => {
    host.spec = fresh.spec;
    if (!plot) return;
    if (made !== look()) build();
    plot.setData(host.spec.data);
    followPointer(plot, host.spec, readout);
  };
  const recolour = () => plot && build();
  const sizes = new ResizeObserver(() => {
    if (host.clientWidth && plot) plot.setSize({ width: host.clientWidth, height: CHART_HEIGHT });
    else if (host.clientWidth) build(); // without a width, uPlot would look for ticks forever
    else if (!host.isConnected) {
      plot?.destroy();
      sizes.disconnect();
      isDark.removeEventListener("change", recolour);
    }
  });
  sizes.observe(host);
  isDark.addEventListener("change", recolour);
  return host;
}

function chart(name, sources, marks, params) {
  const lines = linesOf(name, sources, params);
  const frame = { class: "chart", "data-key": name };
  const heading = h("h3", null, name);
  const empty = params.log ? "No positive value yet." : "No value yet.";
  if (!lines.length) return h("figure", frame, heading, note(empty));
  const data = uPlot.join(lines.map(({ steps, values }) => [steps, values]), lines.map(() => [0, 0]));
  const ends = [Number(params.from || data[0][0]), Number(params.to || data[0].at(-1))];
  const zoom = (params.from || params.to) && ends[0] < ends[1] ? ends : null;
  const plain = sources.filter(({ curves }) => curves.series?.[name]);
  const words = plain.map(({ run, curves }) => {
    const present = curves.series[name].filter((value) => typeof value === "number");
    const ends = `${number(Math.min(...present))} to ${number(Math.max(...present))}`;
    return `${run.name}: ${present.length} points from ${ends}, last ${number(present.at(-1))}`;
  });
  const stepLink = ([step]) => (step > 0 ? link(String(step), address("step", route.id, step)) : String(step));
  const columns = [["Step", stepLink, "number"],
    ...plain.map(({ run }, at) => [run.name, (row) => String(row[at + 1] ?? "–"), "number"])];
  const rows = () => {
    const joined = uPlot.join(plain.map(({ curves }) => [curves.step, curves.series[name]]));
    return joined[0].map((_, at) => joined.map((column) => column[at]));
  };
  const readout = h("span", { class: "readout", adopt: () => {} });
  const spec = { lines, data, zoom, marks, isLog: Boolean(params.log), count: sources.length };
  const values = fold(`values-${name}`, "Values", () => table(`Values of ${name}`, columns, rows()));
  const plot = plotHost(spec, `${name}: ${words.join("; ")}`, readout);
  return h("figure", frame, h("figcaption", null, heading, readout), plot, values);
}

let pickerText = "";

function picker({ names, groups }, chosen) {
  const toggle = (name) => (isOn) => {
    const others = chosen.filter((each) => each !== name);
    change({ metrics: [...others, ...(isOn ? [name] : [])].join(",") || "none" });
  };
  const isShown = (name) => name.toLowerCase().includes(pickerText.toLowerCase());
  const sets = Object.entries(groups).filter(([, all]) => all.some(isShown)).map(([group, all]) => {
    const checks = all.filter(isShown).map((name) => check(name, chosen.includes(name), toggle(name)));
    return h("fieldset", { "data-key": group }, h("legend", null, group || "update"), checks);
  });
  const onsearch = (text) => {
    pickerText = text;
    show();
  };
  const summary = h("summary", null, `Metrics (${chosen.length} of ${names.length})`);
  const body = [search("Search metrics", pickerText, onsearch), sets];
  return h("details", { class: "picker", open: innerWidth > 900 }, summary, body);
}

function markTable(marks, runs) {
  if (!marks.length) return note("Nothing was lost, restarted, resized or resumed.");
  const sign = ({ kind }) => [h("span", { class: `mark-${kind}` }, MARK_SIGNS[kind]), ` ${kind}`];
  const step = ({ step: at, run }) => (at > 0 ? link(number(at), address("step", run.id, at)) : "–");
  const columns = [
    ["Kind", sign], ["Step", step, "number"], ["Time", ({ at_s: at }) => localTime(at)], ["Process", "process"],
    ["Cause", "cause"], ["Message", "message", "text"], ["Cost", costText, "number"],
  ];
  return table("Marks", runs.length > 1 ? [["Run", ({ run }) => run.name], ...columns] : columns, marks);
}

function differences(settings, runs) {
  if (!settings.length) return note("The runs have the same settings.");
  const columns = runs.map((run, at) => [run.name, ({ values }) => String(values[at] ?? "–"), "code"]);
  return table("Settings that differ", [["Setting", "key", "code"], ...columns], settings);
}

function legend(runs) {
  const items = runs.map((run, index) => {
    const line = h("path", { d: "M0 4 H28", "stroke-dasharray": dashOf(index, runs.length).join(" ") || null });
    const frame = { class: `swatch series-${colourOf(index)}`, width: 28, height: 8, "aria-hidden": "true" };
    const swatch = h("svg", frame, line);
    return h("li", null, swatch, " ", link(run.name, address("run", run.id)));
  });
  return h("ul", { class: "legend" }, items);
}

/** Ask for what the view shows of each run. */
async function readCurves(ids, params) {
  const all = (path, parameters) => Promise.all(ids.map((id) => ask(path, { id, ...parameters })));
  const list = ids.map(encodeURIComponent).join(",");
  const [lists, marked, diff] = await Promise.all([
    all("api/metrics"), all("api/marks"), ids.length > 1 ? ask("api/diff", { ids: list }) : null,
  ]);
  const metrics = { names: [...new Set(lists.flatMap(({ names }) => names))], groups: {} };
  for (const [group, names] of lists.flatMap(({ groups }) => Object.entries(groups))) {
    metrics.groups[group] = [...new Set([...(metrics.groups[group] || []), ...names])];
  }
  const usual = FIRST_METRICS.filter((name) => metrics.names.includes(name));
  const first = (usual.length ? usual : metrics.names).slice(0, 6);
  const chosen = params.metrics === "none" ? [] : params.metrics?.split(",") || first;
  const answers = await (chosen.length ? all("api/curves", { names: chosen.join(","), points: 1000 }) : []);
  return { metrics, chosen, answers, marked, diff };
}

VIEWS.curves = async ({ runs: shown, ids, params }) => {
  const { metrics, chosen, answers, marked, diff } = await readCurves(ids, params);
  const runs = shown.map((run, at) => ({ id: ids[at], name: run.name || ids[at] }));
  const sources = runs.map((run, at) => ({ run, curves: answers[at] }));
  const marks = marked.flatMap((answer, at) => answer.marks.map((mark) => ({ ...mark, run: runs[at] })));
  const errors = marked.map(({ journal_error: error }) => error).filter(Boolean);
  const onAxis = marks.filter(({ step }) => step > 0);
  const set = (name) => ({ target }) => change({ [name]: Number(target.value) || "" });
  const place = (name, label) =>
    field(label, h("input", { type: "number", min: 0, value: params[name] || "", onchange: set(name) }));
  const weight = params.smooth || "0";
  const range = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: weight, oninput: set("smooth") });
  const tools = h("div", { class: "tools" }, field(`Smoothing ${weight}`, range),
    check("Log scale", Boolean(params.log), (isOn) => change({ log: isOn ? 1 : "" })),
    place("from", "From step"), place("to", "To step"),
    h("button", { disabled: !params.from && !params.to, onclick: () => change({ from: "", to: "" }) }, "Whole run"));
  const empty = metrics.names.length ? "Choose a metric." : "The metrics appear after the first step.";
  const charts = chosen.map((name) => chart(name, sources, onAxis, params));
  const hint = "Drag over a chart to zoom, double-click for the whole run, click on a point for its step. "
    + "Dotted lines are steps that were repeated.";
  const board = h("div", { class: "charts" }, charts.length ? charts : note(empty));
  return [
    title("Curves"), runs.length > 1 && legend(runs), tools,
    h("div", { class: "split" }, picker(metrics, chosen), h("div", null, board, h("p", { class: "quiet" }, hint))),
    section("Recoveries and other marks", errors.map(note), (marks.length || !errors.length) && markTable(marks, runs)),
    diff && section("Settings that differ", differences(diff.settings, runs)),
  ];
};

FILE_FILTERS["api/curves"] = (answer, { names = "" }) => {
  const choose = (series = {}) => Object.fromEntries(names.split(",").map((name) => [name, series[name] || []]));
  const repeated = answer.superseded || {};
  return { ...answer, series: choose(answer.series), superseded: { ...repeated, series: choose(repeated.series) } };
};
