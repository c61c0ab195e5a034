// Numbers, times and elements as text. Data becomes text nodes only, never markup.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const NONE = "–";

/** An element with attributes and children; strings become text nodes. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set the text of an element if it differs, so that selections survive. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function number(value) {
  return value === null || value === undefined
    ? NONE
    : Math.abs(value) < 10
      ? tenths.format(value)
      : whole.format(value);
}

/** 4 ms, 0.02 s, 12 s, 4 min, 3 h; below 1 s in milliseconds with `fine`. */
export function duration(seconds, fine = false) {
  if (seconds === null || seconds === undefined) return NONE;
  if (fine && seconds < 1) {
    const ms = seconds * 1e3;
    return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
  }
  if (seconds > 0 && seconds < 0.01) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
  if (seconds < 1) return `${Number(seconds.toFixed(seconds < 0.1 ? 3 : 2))} s`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function count(value, noun) {
  return `${whole.format(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A bar that is filled to `share` of 1, with the words `said` for screen readers. */
export function meter(label, share, said) {
  const filled = Math.max(0, Math.min(1, share));
  const attributes = {
    "aria-label": label,
    "aria-valuemin": "0",
    "aria-valuemax": "100",
    "aria-valuetext": said,
    title: said,
  };
  attributes["aria-valuenow"] = String(Math.round(filled * 100));
  const bar = element("div", { class: "meter", role: "meter", ...attributes }, element("span"));
  bar.firstChild.style.width = `${(filled * 100).toFixed(1)}%`;
  return bar;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** A time element that shows the local time of day. */
export function timeOf(seconds) {
  const date = new Date(seconds * 1e3);
  return element("time", { datetime: date.toISOString(), title: date.toISOString() }, clock.format(date));
}

/** Make the children of `parent` those of `items`; one whose item did not change stays the same element. */
export function sync(parent, items, make) {
  const before = parent.made ?? [];
  parent.made = items.map((item, at) => {
    const told = JSON.stringify(item);
    return before[at]?.told === told ? before[at] : { told, node: make(item) };
  });
  const nodes = parent.made.map((each) => each.node);
  if (nodes.length !== parent.children.length || nodes.some((node, at) => parent.children[at] !== node)) {
    parent.replaceChildren(...nodes);
  }
}
