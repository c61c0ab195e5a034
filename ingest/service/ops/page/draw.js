// The series of the last 15 minutes, drawn with uPlot, each with a legend of its own and a sentence for screen readers.

import { NONE, byId, duration, element, number, say } from "./text.js";

const KEPT = 900;
const SHORTEST = 120;
const HEIGHT = 160;
const PLOTS = [
  {
    id: "rate",
    title: "Rows per second",
    show: number,
    tick: number,
    series: [
      { name: "put", label: "put", color: "--blue" },
      { name: "deleted", label: "deleted", color: "--orange", kind: "daemon" },
    ],
  },
  {
    id: "age",
    title: "Age of the oldest row",
    show: (value) => duration(value),
    tick: seconds,
    series: [
      { name: "committed", label: "not committed", color: "--blue" },
      { name: "flushed", label: "not flushed", color: "--orange" },
    ],
  },
  {
    id: "ack",
    title: "Ack, p99",
    show: (value) => duration(value, true),
    tick: seconds,
    series: [{ name: "ack_p99", label: "p99 of 5 s", color: "--blue" }],
  },
  {
    id: "lag",
    title: "Rows behind the source",
    show: number,
    tick: number,
    series: [{ name: "lag_rows", label: "lag", color: "--blue" }],
    only: (kept) => kept.lag_rows.some((value) => value !== null),
  },
];

/** Samples by number, as lists of equal length; a message repeats some of the newest. */
export class Samples {
  constructor() {
    this.first = 0;
    this.lists = null;
  }

  take(history, whole) {
    const { first, ...lists } = history;
    const kept = first - this.first;
    if (whole || this.lists === null || kept < 0 || kept > this.lists.time.length) {
      this.first = first;
      this.lists = lists;
      return;
    }
    for (const [name, values] of Object.entries(lists)) {
      const list = this.lists[name];
      list.length = Math.min(list.length, kept);
      list.push(...values);
    }
    const over = this.lists.time.length - KEPT;
    if (over > 0) {
      this.first += over;
      for (const list of Object.values(this.lists)) list.splice(0, over);
    }
  }
}

class Plot {
  constructor(told) {
    this.told = told;
    this.picture = element("div", { class: "picture", role: "img" });
    this.values = told.series.map(() => element("span", { class: "value" }));
    const legend = told.series.map((series, at) => {
      const swatch = element("span", { class: `swatch ${at ? "dashed" : ""}`, "aria-hidden": "true" });
      swatch.style.setProperty("--color", `var(${series.color})`);
      return element("li", {}, swatch, element("span", {}, series.label), this.values[at]);
    });
    const head = element(
      "figcaption",
      {},
      element("h3", {}, told.title),
      element("ul", { class: "legend" }, ...legend),
    );
    this.node = element("figure", { id: `chart-${told.id}` }, head, this.picture);
    this.chart = null;
    this.lists = null;
  }

  show(lists) {
    this.lists = lists;
    const shown = this.told.only === undefined || this.told.only(lists);
    this.node.hidden = !shown;
    if (!shown) return;
    const data = [lists.time, ...this.told.series.map((series) => lists[series.name])];
    if (this.chart === null) this.chart = this.made(data);
    else this.chart.setData(data);
    this.tell(null);
    const texts = this.told.series.map((series) => `${series.label} ${this.told.show(last(lists[series.name]))}`);
    this.picture.setAttribute("aria-label", `${this.told.title}, now: ${texts.join(", ")}. ${range(lists, this.told)}`);
  }

  tell(at) {
    this.told.series.forEach((series, number) => {
      const values = this.lists[series.name];
      const value = at === null || at === undefined ? last(values) : values[at];
      say(this.values[number], value === null || value === undefined ? NONE : this.told.show(value));
    });
  }

  made(data) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const font = `11px ${style.getPropertyValue("--sans") || "sans-serif"}`;
    const axis = {
      stroke: color("--muted"),
      font,
      ticks: { show: false },
      grid: { stroke: color("--line"), width: 1 },
    };
    const options = {
      width: Math.max(200, this.picture.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "memwal" } },
      scales: {
        x: { time: true, range: (chart) => times(chart.data[0]) },
        y: { range: (_, __, most) => [0, top(most)] },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 24,
          splits: (_, __, least, most) => steps(least, most),
          values: (chart, at) => at.map((time) => before(chart.scales.x.max - time)),
        },
        { ...axis, size: 58, space: 34, values: (_, values) => values.map(this.told.tick) },
      ],
      series: [
        {},
        ...this.told.series.map((series, at) => ({
          label: series.label,
          stroke: color(series.color),
          width: 1.5,
          dash: at ? [4, 3] : undefined,
          fill: at ? undefined : `${color(series.color)}1f`,
          points: {
            show: true,
            size: 3,
            fill: color(series.color),
            filter: (chart, number) => alone(chart.data[number]),
          },
          spanGaps: false,
        })),
      ],
      hooks: { setCursor: [(chart) => this.tell(chart.cursor.idx)] },
    };
    return new window.uPlot(options, data, this.picture);
  }

  resize() {
    if (this.chart !== null) this.chart.setSize({ width: Math.max(200, this.picture.clientWidth), height: HEIGHT });
  }

  again() {
    if (this.chart === null) return;
    this.chart.destroy();
    this.chart = null;
    this.show(this.lists);
  }
}

/** All plots; they follow the width of the page and its colours. */
export class Plots {
  constructor(kind) {
    const ours = (series) => series.kind === undefined || series.kind === kind;
    this.plots = PLOTS.map((told) => new Plot({ ...told, series: told.series.filter(ours) }));
    byId("charts").replaceChildren(...this.plots.map((plot) => plot.node));
    new ResizeObserver(() => this.plots.forEach((plot) => plot.resize())).observe(byId("charts"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.plots.forEach((plot) => plot.again()),
    );
  }

  show(lists) {
    this.plots.forEach((plot) => plot.show(lists));
  }
}

/** The ends of the time axis. */
function times(list) {
  const most = last(list) ?? Date.now() / 1e3;
  return [Math.min(list[0] ?? most, most - SHORTEST), most];
}

/** Where the time axis has labels: at the newest sample, and at whole minutes before it. */
function steps(least, most) {
  const step = most - least < 200 ? 60 : most - least < 500 ? 120 : 300;
  const found = [];
  for (let at = most; at >= least; at -= step) found.unshift(at);
  return found;
}

function before(seconds) {
  return seconds < 1 ? "now" : `−${Math.round(seconds / 60)} min`;
}

/** The samples with nothing measured beside them: a line would not show them. */
function alone(values) {
  const none = (at) => values[at] === null || values[at] === undefined;
  return [...values.keys()].filter((at) => !none(at) && none(at - 1) && none(at + 1));
}

function seconds(value) {
  if (value === 0) return "0";
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return value < 180 ? `${Number(value.toPrecision(3))} s` : `${Number((value / 60).toPrecision(3))} min`;
}

function last(values) {
  return values.length ? values[values.length - 1] : null;
}

function top(most) {
  return most > 0 ? most * 1.15 : 1;
}

function range(lists, told) {
  const [series] = told.series;
  const known = lists[series.name].filter((value) => value !== null);
  if (!known.length) return "Nothing was measured.";
  return `In the last 15 minutes between ${told.show(Math.min(...known))} and ${told.show(Math.max(...known))}.`;
}
