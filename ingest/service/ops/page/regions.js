// The regions, by the daemon that serves them.

import { NONE, byId, bytes, count, duration, element, meter, number, say, sync } from "./text.js";

const STATES = {
  serving: "serving",
  flush_failing: "flushes fail",
  fenced: "fenced",
  poisoned: "stopped",
  claiming: "being claimed",
  "no owner": "no owner",
  draining: "ending",
  silent: "does not answer",
  denied: "refuses our token or certificate",
  ended: "dead",
  unknown: "not seen yet",
  broken: "broken",
  elsewhere: "at another daemon",
  idle: "idle",
};
const SEVERITY = {
  serving: "good",
  claiming: "busy",
  draining: "busy",
  unknown: "busy",
  flush_failing: "bad",
  fenced: "bad",
  poisoned: "bad",
  "no owner": "bad",
  silent: "bad",
  denied: "bad",
  ended: "bad",
  broken: "bad",
  elsewhere: "quiet",
  idle: "quiet",
};

/** A text in which regions have their numbers in place of their ids. */
export function named(text, regions) {
  return text.replace(/region ([0-9a-f]{8}-[0-9a-f-]{27})/gi, (all, id) => {
    const region = regions.find((each) => each.id === id);
    return region === undefined ? all : `${all.slice(0, 6)} ${region.bucket}`;
  });
}

/** The state of a region, daemon or table. */
export function badge(state) {
  return element("span", { class: "badge", "data-severity": SEVERITY[state] ?? "busy" }, STATES[state] ?? state);
}

/** The table of regions, with a head for each daemon. */
export function showRegions(message) {
  const { regions, daemons } = message;
  const shown = regions.length > 0 || message.fleet !== undefined;
  say(byId("regions-name"), message.fleet === undefined ? "Regions" : "Daemons");
  byId("regions").hidden = !shown;
  byId("regions-empty").hidden = shown;
  const serving = regions.filter((region) => region.state === "serving").length;
  say(
    byId("regions-sum"),
    regions.length ? `${serving} of ${regions.length} serving, ${count(daemons.length, "daemon")}` : "",
  );
  const groups = daemons.map((daemon) => ({
    daemon,
    regions: regions.filter((region) => region.owner === daemon.endpoint),
  }));
  const known = new Set(daemons.map((daemon) => daemon.endpoint));
  const homeless = regions.filter((region) => !known.has(region.owner));
  if (homeless.length) groups.push({ daemon: null, regions: homeless });
  const table = byId("regions");
  while (table.tBodies.length > groups.length) table.tBodies[table.tBodies.length - 1].remove();
  groups.forEach((group, at) => {
    const body = table.tBodies[at] ?? table.createTBody();
    body.dataset.state = group.daemon === null ? "no owner" : group.daemon.state;
    const head = { ...group.daemon, answered: answered(group.daemon), served: group.daemon?.regions ?? group.regions.length };
    const rows = group.regions.flatMap((region) => [
      rounded(region),
      ...(region.error ? [{ why: region.error, id: region.id }] : []),
    ]);
    sync(body, [head, ...rows], (item) =>
      item.why ? whyRow(item) : item.bucket === undefined ? daemonRow(item) : regionRow(item),
    );
  });
}

function answered(daemon) {
  return daemon === null || daemon.state === "serving" || daemon.answered === null ? null : duration(daemon.answered);
}

function daemonRow(daemon) {
  const head = element("th", { colspan: "6", scope: "rowgroup" });
  if (daemon.endpoint === undefined) head.append("Without an owner");
  else {
    const last =
      daemon.answered === null || daemon.answered === undefined ? "" : `, last answer ${daemon.answered} ago`;
    const waiting = !daemon.here && daemon.waiting ? `, up to ${count(daemon.waiting, "SST")} waiting` : "";
    head.append(element("span", { class: "mono" }, daemon.endpoint || "this process"), " ", badge(daemon.state));
    head.append(
      element(
        "span",
        { class: "hint" },
        `${daemon.here ? " this daemon, " : " "}${count(daemon.served, "region")}${waiting}${last}`,
      ),
    );
  }
  return element("tr", { class: "daemon" }, head);
}

function rounded(region) {
  return { ...region, behind: region.behind === undefined ? null : duration(region.behind) };
}

function regionRow(region) {
  const name = element(
    "th",
    { scope: "row", title: region.id },
    `region ${region.bucket}`,
    element("span", { class: "hint mono may-go" }, ` ${region.id.slice(0, 8)}`),
  );
  const state = element("td", {}, badge(region.state));
  return element(
    "tr",
    { "data-state": region.state },
    name,
    state,
    element("td", { class: "number" }, region.epoch ?? NONE),
    fill(region),
    element("td", { class: "number" }, region.ssts ?? NONE),
    element("td", { class: "number may-go" }, region.behind ?? NONE),
  );
}

/** The error of a region, below it and as wide as the table. */
function whyRow({ why, id }) {
  return element(
    "tr",
    { class: "why" },
    element("td", { colspan: "6", class: "error" }, why.replace(`region ${id}: `, "")),
  );
}

function fill(region) {
  if (region.memtable_bytes === undefined) return element("td", { class: "hint" }, NONE);
  const share = Math.min(1, region.memtable_bytes / region.memtable_limit);
  const text = `${bytes(region.memtable_bytes)} of ${bytes(region.memtable_limit)}, ${number(region.memtable_rows)} rows`;
  return element(
    "td",
    { class: "fill" },
    meter(`Memtable of region ${region.bucket}`, share, text),
    element("span", { class: "size" }, bytes(region.memtable_bytes)),
  );
}
