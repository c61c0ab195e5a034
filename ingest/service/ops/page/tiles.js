// The tiles: how far each level is behind, and rows and times.

import { NONE, byId, bytes, count, duration, element, meter, number, sync } from "./text.js";

const LEVELS = {
  latest: ["Searchable", "age since arrival at this daemon"],
  flushed: ["Flushed", "age since searchable"],
  committed: ["Committed", "age since searchable"],
};
const FROM_SOURCE = ["Searchable", "time since landing in the source"];
/** How far beyond its limit a level may be: a flush and a commit begin at their limit, and take time. */
const SLACK = { latest: 1, flushed: 1.25, committed: 1.25 };

/** How far each level is behind, beside its limit. */
export function showLevels(message) {
  sync(byId("levels"), message.levels, (level) => levelTile(level, message.kind));
}

function levelTile(level, kind) {
  const [title, meaning] = kind === "run" && level.name === "latest" ? FROM_SOURCE : LEVELS[level.name];
  const { seconds, limit } = level;
  const late = limit !== null && seconds > SLACK[level.name] * limit;
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
  if (message.fleet) {
    const { tables, serving, elsewhere } = message.fleet;
    tiles.push(["Tables", number(tables), `${number(serving)} open here${elsewhere ? `, ${number(elsewhere)} elsewhere` : ""}`]);
  }
  if (message.rows !== undefined) tiles.push(["Rows", number(message.rows), pending(message)]);
  if (message.storage) tiles.push(storageTile(message.storage));
  if (run) {
    tiles.push([
      "Behind the source",
      run.lag_rows === null ? NONE : number(run.lag_rows),
      run.lag_rows === null ? "rows are not counted here" : "rows",
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
  tiles.push(["Ack p50 / p99", times(acks), `${count(acks.count, run ? "stream" : "group")} in the last minute`]);
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

/** The alert MemwalStorageGrows has the same bounds. */
const MUCH = { factor: 5, bytes: 1e9 };

/** All bytes of the table, and what they are for. */
function storageTile({ bytes: sizes, factor }) {
  const total = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  const names = { older: "older versions", ssts: "SSTs", log: "log", orphans: "orphans" };
  const parts = Object.entries(names).filter(([kind]) => sizes[kind] > 0.05 * total);
  const said = parts.map(([kind, name]) => `, ${name} ${bytes(sizes[kind])}`).join("");
  return ["On storage", bytes(total), `${factor.toFixed(1)} times the newest version${said}`, factor > MUCH.factor && total > MUCH.bytes ? "warn" : null];
}

/** What is not in the base table yet, of the regions whose state is known. */
function pending({ regions, base_version }) {
  const sum = (name) => regions.reduce((total, region) => total + (region[name] ?? 0), 0);
  const [rows, ssts] = [sum("memtable_rows"), sum("ssts")];
  const waits = [rows ? `${number(rows)} in memtables` : "", ssts ? `${count(ssts, "SST")} waiting` : ""];
  const said = waits.filter((each) => each).join(", ");
  return `in base version ${base_version}${said ? `; ${said}` : ""}`;
}

/** p50 / p99, the unit once where both have the same. */
function times({ p50, p99 }) {
  const [low, high] = [duration(p50, true), duration(p99, true)];
  const [value, unit] = low.split(" ");
  return unit !== undefined && high.endsWith(` ${unit}`) ? `${value} / ${high}` : `${low} / ${high}`;
}
