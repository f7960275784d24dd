// SPDX-License-Identifier: Apache-2.0
// The curves of one run or several: choice of metrics, charts by uPlot, marks of recoveries, differing settings.
"use strict";

const FIRST_METRICS = [
  "reward/mean", "eval/accuracy", "eval/reward", "loss", "time/step", "completions/length_mean", "policy/entropy", "policy/kl", "grad_norm",
];
const MARK_SIGNS = { recovery: "▼", restart: "■", resize: "◆", resume: "▶" };
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = matchMedia("(prefers-color-scheme: dark)");
const dashOf = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];

/** The exponential moving average, without the bias of its first values; absent values stay absent. */
function smooth(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** The lines of a chart: those of superseded steps and unsmoothed values are thin. */
function linesOf(name, runs, params) {
  const weight = Number(params.smooth || 0);
  return runs.flatMap(({ run, curves }, index) => {
    const kinds = [];
    const add = (source, kind) => {
      const values = source?.series?.[name];
      if (!values?.some((value) => typeof value === "number")) return;
      const positive = values.map((value) => (params.log && !(value > 0) ? null : value));
      kinds.push({ run, index, kind, steps: source.step, values: kind === "smoothed" ? smooth(positive, weight) : positive });
    };
    add(curves.superseded, "superseded");
    add(curves, weight ? "raw" : "line");
    if (weight) add(curves, "smoothed");
    return kinds;
  });
}

function markText(mark) {
  const cost = mark.cost_s === null ? "under way" : `cost ${duration(mark.cost_s)}`;
  return `${mark.kind} at step ${mark.step}: ${[mark.process, mark.cause, mark.message].filter(Boolean).join(", ")}; ${cost}`;
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px sans-serif`;
  ctx.textAlign = "center";
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = css(`--mark-${mark.kind}`) || css("--text");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(MARK_SIGNS[mark.kind] || "●", x, bbox.top - 3 * devicePixelRatio);
  }
  ctx.restore();
}

/** Show the marks at the pointer, and the values of its step in the heading of the chart. */
function followCursor(plot, spec, readout) {
  const { idx, left, top } = plot.cursor;
  const isInside = typeof idx === "number" && left >= 0;
  const near = isInside ? spec.marks.filter((mark) => Math.abs(plot.valToPos(mark.step, "x") - left) < 6) : [];
  const box = plot.over.getBoundingClientRect();
  if (plot.over.matches(":hover")) showTip(near.map(markText).join("\n"), box.left + left, box.top + top);
  const index = isInside ? idx : plot.data[0].length - 1;
  const values = spec.lines.map((line, at) => (line.kind === "superseded" || line.kind === "raw" ? null : plot.data[at + 1][index]));
  const shown = values.filter((value) => typeof value === "number");
  readout.textContent = shown.length ? `step ${plot.data[0][index]}: ${shown.map(number).join(" · ")}` : "";
}

function makePlot(host, spec, readout) {
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const series = spec.lines.map(({ kind, index }) => ({
    stroke: css(`--series-${(index % COLOURS) + 1}`), width: { raw: 1, superseded: 1 }[kind] || 1.75, alpha: { raw: 0.3, superseded: 0.6 }[kind] || 1,
    dash: kind === "superseded" ? [2, 4] : dashOf(index), spanGaps: true,
  }));
  const range = (_, least, most) => spec.zoom || (least === most ? [least - 1, most + 1] : [least, most]);
  const plot = new uPlot({
    width: host.clientWidth, height: 200, legend: { show: false }, padding: [14, 8, 0, 0],
    scales: { x: { time: false, range }, y: { distr: spec.log ? 3 : 1 } },
    axes: [{ ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
    series: [{}, ...series],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => change({ from: "", to: "" }) } },
    hooks: {
      draw: [(each) => drawMarks(each, host.spec.marks)],
      setCursor: [(each) => followCursor(each, host.spec, readout)],
      setSelect: [(each) => zoomTo(each)],
    },
  }, spec.data, host);
  let downAt = 0;
  plot.over.addEventListener("mousedown", ({ clientX }) => (downAt = clientX));
  plot.over.addEventListener("mouseleave", () => showTip(""));
  plot.over.addEventListener("click", ({ clientX }) => {
    const step = plot.data[0][plot.cursor.idx];
    if (Math.abs(clientX - downAt) < 4 && step > 0) location.hash = address("step", route.id, step);
  });
  return plot;
}

function zoomTo(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (plot.over.matches(":hover") || plot.cursor.event) change({ from: Math.floor(from), to: Math.ceil(to) });
}

/** The element of a chart: it makes the plot when it has a width, and an update changes the plot's data only. */
function plotHost(spec, label, readout) {
  const host = h("div", { class: "plot", role: "img", "aria-label": label });
  let plot;
  let made;
  const signature = () => JSON.stringify([host.spec.log, isDark.matches, host.spec.lines.map(({ run, kind }) => [run.id, kind])]);
  const build = () => {
    plot?.destroy();
    made = signature();
    plot = makePlot(host, host.spec, host.readout);
    followCursor(plot, host.spec, host.readout);
  };
  host.spec = spec;
  host.readout = readout;
  host.adopt = (fresh) => {
    Object.assign(host.spec, fresh.spec);
    if (made !== signature()) return plot && build();
    plot.setData(host.spec.data);
    return followCursor(plot, host.spec, host.readout);
  };
  new ResizeObserver(() => {
    if (!host.clientWidth) return;
    if (plot) plot.setSize({ width: host.clientWidth, height: 200 });
    else build();
  }).observe(host);
  isDark.addEventListener("change", () => host.isConnected && plot && build());
  return host;
}

function chart(name, runs, marks, params) {
  const lines = linesOf(name, runs, params);
  const heading = h("h3", null, name);
  if (!lines.length) return h("figure", { class: "chart", "data-key": name }, heading, note(params.log ? "No positive value yet." : "No value yet."));
  const data = uPlot.join(lines.map(({ steps, values }) => [steps, values]), lines.map(() => [0]));
  const zoom = params.from || params.to ? [Number(params.from || data[0][0]), Number(params.to || data[0].at(-1))] : null;
  const readout = h("span", { class: "readout", adopt: () => {} });
  const main = lines.filter(({ kind }) => kind === "line" || kind === "raw");
  const label = main.map(({ run, values }) => {
    const present = values.filter((value) => typeof value === "number");
    const [least, most] = [Math.min(...present), Math.max(...present)];
    return `${run.name}: ${name} in ${present.length} points from ${number(least)} to ${number(most)}, last ${number(present.at(-1))}`;
  }).join("; ");
  const columns = [
    { name: "Step", number: true, cell: ({ step }) => (step > 0 ? link(String(step), address("step", route.id, step)) : String(step)) },
    ...main.map(({ run }, index) => ({ name: run.name, number: true, cell: ({ values }) => (values[index] ?? "–").toString() })),
  ];
  const rows = () => {
    const joined = uPlot.join(main.map(({ steps, values }) => [steps, values]));
    return joined[0].map((step, at) => ({ step, values: joined.slice(1).map((values) => values[at]) }));
  };
  const values = fold(`values-${name}`, "Values", () => table(`Values of ${name}`, columns, rows(), { quiet: true }));
  const plot = plotHost({ lines, data, zoom, log: Boolean(params.log), marks }, label, readout);
  return h("figure", { class: "chart", "data-key": name }, h("figcaption", null, heading, readout), plot, values);
}

let pickerText = "";

function picker(metrics, chosen) {
  const toggle = (name) => ({ target }) =>
    change({ metrics: (target.checked ? [...chosen, name] : chosen.filter((each) => each !== name)).join(",") || "none" });
  const isShown = (name) => name.toLowerCase().includes(pickerText.toLowerCase());
  const groups = Object.entries(metrics.groups).map(([group, names]) => {
    const boxes = names.map((name) => h("label", { hidden: !isShown(name), "data-name": name },
      h("input", { type: "checkbox", checked: chosen.includes(name), onchange: toggle(name) }), " ", name));
    return h("fieldset", { hidden: !names.some(isShown), "data-key": group }, h("legend", null, group), boxes);
  });
  const onsearch = (text) => {
    pickerText = text;
    show();
  };
  const body = [search("Search metrics", pickerText, onsearch), groups];
  return h("details", { class: "picker", open: innerWidth > 900 }, h("summary", null, `Metrics (${chosen.length} of ${metrics.names.length})`), body);
}

function markTable(marks, several) {
  if (!marks.length) return note("Nothing was lost, restarted, resized or resumed.");
  return table("Marks", [
    { name: "Kind", cell: ({ kind }) => [h("span", { class: `mark-${kind}`, "aria-hidden": "true" }, MARK_SIGNS[kind]), ` ${kind}`] },
    ...(several ? [{ name: "Run", cell: ({ run }) => run.name }] : []),
    { name: "Step", number: true, cell: ({ step, run }) => link(number(step), address("step", run.id, step || 1)) },
    { name: "Time", cell: ({ at_s: at }) => localTime(at) },
    { name: "Process", cell: ({ process }) => process || "–" },
    { name: "Cause", cell: ({ cause }) => cause || "–" },
    { name: "Message", kind: "text", cell: ({ message }) => message || "–" },
    { name: "Cost", number: true, cell: ({ cost_s: cost }) => (cost === null ? "under way" : duration(cost)) },
  ], marks, { quiet: true });
}

function differences(settings, runs) {
  const columns = [{ name: "Setting", kind: "code", cell: ({ key }) => key },
    ...runs.map((run, index) => ({ name: run.name, kind: "code", cell: ({ values }) => (values[index] === null ? "–" : String(values[index])) }))];
  return settings.length ? table("Settings that differ", columns, settings, { quiet: true }) : note("The runs have the same settings.");
}

function legend(runs) {
  const swatch = (index) => h("svg", { class: `swatch series-${(index % COLOURS) + 1}`, viewBox: "0 0 28 8", width: 28, height: 8 },
    h("path", { d: "M0 4 H28", "stroke-dasharray": dashOf(index).join(" ") || null }));
  return h("ul", { class: "legend" }, runs.map((run, index) => h("li", null, swatch(index), " ", link(run.name || run.id, address("run", run.id)))));
}

VIEWS.curves = async ({ runs, ids, params }) => {
  const several = ids.length > 1;
  const [lists, marked, diff] = await Promise.all([
    Promise.all(ids.map((id) => ask("api/metrics", { id }))), Promise.all(ids.map((id) => ask("api/marks", { id }))),
    several ? ask("api/diff", { ids: ids.join(",") }) : { settings: [] },
  ]);
  const metrics = { names: [...new Set(lists.flatMap(({ names }) => names))], groups: {} };
  for (const { groups } of lists) for (const [group, names] of Object.entries(groups)) metrics.groups[group] = [...new Set([...(metrics.groups[group] || []), ...names])];
  const defaults = FIRST_METRICS.filter((name) => metrics.names.includes(name)).slice(0, 6);
  const chosen = params.metrics === "none" ? [] : params.metrics?.split(",") || (defaults.length ? defaults : metrics.names.slice(0, 4));
  const answers = await Promise.all(ids.map((id) => (chosen.length ? ask("api/curves", { id, names: chosen.join(","), points: 1000 }) : {})));
  const sources = runs.map((run, index) => ({ run: { ...run, id: ids[index], name: run.name || ids[index] }, curves: answers[index] }));
  const marks = marked.flatMap((answer, index) => answer.marks.map((mark) => ({ ...mark, run: sources[index].run })));
  const place = (name, label) => field(label, h("input", { type: "number", min: 0, value: params[name] || "", onchange: ({ target }) => change({ [name]: target.value }) }));
  const weight = params.smooth || 0;
  const tools = h("div", { class: "tools" },
    field(`Smoothing ${weight}`, h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: weight, oninput: ({ target }) => change({ smooth: Number(target.value) || "" }) })),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: Boolean(params.log), onchange: ({ target }) => change({ log: target.checked ? 1 : "" }) }), " Log scale"),
    place("from", "From step"), place("to", "To step"), h("button", { disabled: !(params.from || params.to), onclick: () => change({ from: "", to: "" }) }, "Whole run"));
  const charts = chosen.map((name) => chart(name, sources, marks, params));
  const empty = note(metrics.names.length ? "Choose a metric to see its curve." : "The run has no metrics yet; they appear after its first step.");
  return [
    h("h1", { tabindex: "-1" }, "Curves"), several && legend(sources.map(({ run }) => run)), tools,
    h("div", { class: "split" }, picker(metrics, chosen), h("div", { class: "charts" }, charts.length ? charts : empty)),
    h("p", { class: "quiet" }, "Drag over a chart to zoom, double-click for the whole run, click on a point for its step. Thin dotted lines are steps that were repeated."),
    h("section", null, h("h2", null, "Recoveries and other marks"), markTable(marks, several)),
    several && h("section", null, h("h2", null, "Settings that differ"), differences(diff.settings, sources.map(({ run }) => run))),
  ];
};

FILE_FILTERS["api/curves"] = (answer, { names = "" }) => {
  const choose = (series) => Object.fromEntries(names.split(",").map((name) => [name, series?.[name]]).filter(([, values]) => values));
  return { step: answer.step, series: choose(answer.series), superseded: { step: answer.superseded?.step || [], series: choose(answer.superseded?.series) } };
};
