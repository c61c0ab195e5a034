// The tiles: how far each level is behind, and rows and times.

import { NONE, byId, count, duration, element, meter, number, sync } from "./text.js";

const LEVELS = {
  latest: ["Latest", "in memory, searchable"],
  flushed: ["Flushed", "in an SST"],
  committed: ["Committed", "in the base table"],
};
const FROM_SOURCE = ["Latest", "from the source, of the last micro-batch"];

/** How far each level is behind, beside its limit. */
export function showLevels(message) {
  sync(byId("levels"), message.levels, (level) => levelTile(level, message.kind));
}

function levelTile(level, kind) {
  const [title, meaning] = kind === "run" && level.name === "latest" ? FROM_SOURCE : LEVELS[level.name];
  const { seconds, limit } = level;
  const late = limit !== null && seconds > 1.25 * limit;
  const share = limit && seconds !== null ? Math.min(1, seconds / limit) : 0;
  const tile = element("div", {
    class: "tile",
    id: `level-${level.name}`,
    "data-late": late ? (seconds > 2 * limit ? "very" : "yes") : null,
  });
  const value = element(
    "p",
    { class: "value" },
    duration(seconds),
    late ? element("span", { class: "late" }, " late") : null,
  );
  tile.append(element("h3", {}, title, element("small", {}, ` ${meaning}`)), value);
  if (limit !== null) {
    const said = `${duration(seconds)} of ${duration(limit)}`;
    tile.append(meter(title, share, said));
  } else {
    tile.append(element("div", { class: "meter none" }));
  }
  const allowed =
    limit !== null
      ? `limit ${duration(limit)} (${level.setting})`
      : level.setting
        ? `no limit (${level.setting} = 0)`
        : "no limit";
  const most = level.most === null ? "" : `at most ${duration(level.most)} in the last minute`;
  tile.append(element("p", { class: "hint" }, element("span", {}, allowed), element("span", {}, most)));
  return tile;
}

/** Rows per second, lag, bad rows, times of acks and appends. */
export function showFlow(message) {
  const { rates, acks, appends, run } = message;
  const tiles = [["Put", number(rates.put), "rows/s"]];
  if (run) {
    const lag = run.lag_seconds === null ? "" : `, the last were ${duration(run.lag_seconds)} old`;
    tiles.push([
      "Behind the source",
      run.lag_rows === null ? NONE : number(run.lag_rows),
      run.lag_rows === null ? `rows are not counted here${lag}` : `rows${lag}`,
    ]);
    tiles.push([
      "Bad rows",
      number(run.bad),
      `${count(run.letters, "dead letter")}; dlq.mode = ${run.dlq}`,
      run.bad ? "warn" : null,
    ]);
    tiles.push([
      "Micro-batches",
      number(run.micro_batches),
      `${number(run.rows)} rows, ${number(run.repeated)} sent again`,
    ]);
  } else {
    tiles.push(["Deleted", number(rates.deleted), "keys/s"]);
  }
  tiles.push(["Ack p50 / p99", times(acks), `${number(acks.count)} ${run ? "streams" : "groups"} in the last minute`]);
  if (!run) tiles.push(["Append p50 / p99", times(appends), `${number(appends.count)} in the last minute`]);
  if (message.waiting_puts) tiles.push(["Puts waiting", number(message.waiting_puts), "for room", "warn"]);
  sync(byId("flow"), tiles, ([name, value, hint, kind]) =>
    element(
      "div",
      { class: "tile", "data-kind": kind },
      element("dt", {}, name),
      element("dd", { class: "value" }, value),
      element("dd", { class: "hint" }, hint),
    ),
  );
}

/** p50 / p99, the unit once where both have the same. */
function times({ p50, p99 }) {
  const [low, high] = [duration(p50, true), duration(p99, true)];
  const [value, unit] = low.split(" ");
  return unit !== undefined && high.endsWith(` ${unit}`) ? `${value} / ${high}` : `${low} / ${high}`;
}
