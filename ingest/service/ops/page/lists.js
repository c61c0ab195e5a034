// Commits, bad rows, requests to storage and events, newest first.

import { named } from "./regions.js";
import { NONE, byId, count, duration, element, number, say, sync, timeOf } from "./text.js";

const FEW = { commits: 8, events: 10 };
const all = { commits: false, events: false };

/** Let the buttons below the lists show all of them; `again` shows the lists. */
export function toggleLists(again) {
  for (const name of Object.keys(FEW)) {
    byId(`${name}-more`).addEventListener("click", () => {
      all[name] = !all[name];
      again();
    });
  }
}

/** The items to show; a button shows the others. */
function few(name, items) {
  const button = byId(`${name}-more`);
  button.hidden = items.length <= FEW[name];
  say(button, all[name] ? "Show fewer" : `Show all ${items.length}`);
  button.setAttribute("aria-expanded", String(all[name]));
  return all[name] ? items : items.slice(0, FEW[name]);
}

export function showCommits(message) {
  const commits = message.commits ?? [];
  byId("commits").hidden = !commits.length;
  byId("commits-empty").hidden = commits.length > 0;
  say(byId("commits-note"), message.commits_here === false ? "another daemon commits for all" : "");
  const longest = Math.max(...commits.map((commit) => commit.seconds ?? 0), 0.001);
  sync(
    byId("commits").tBodies[0],
    few("commits", commits).map((commit) => ({ ...commit, share: (commit.seconds ?? 0) / longest })),
    commitRow,
  );
}

function commitRow(commit) {
  const time = element("td", {}, timeOf(commit.time));
  if (commit.error !== undefined) {
    const times = commit.times > 1 ? ` (${commit.times} times)` : "";
    const failed = element(
      "td",
      { colspan: "4" },
      element("span", { class: "badge", "data-severity": "bad" }, `failed${times}`),
    );
    failed.append(element("p", { class: "error" }, commit.error));
    return element("tr", { "data-state": "failed" }, time, failed);
  }
  const took = element("td", { class: "number took" }, duration(commit.seconds, true));
  if (commit.seconds !== null) {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", commit.share.toFixed(3));
    took.prepend(bar);
  }
  return element(
    "tr",
    {},
    time,
    element("td", {}, `version ${commit.version}`),
    element("td", { class: "number" }, number(commit.rows)),
    element("td", { class: "number" }, number(commit.ssts)),
    took,
  );
}

/** Micro-batches with bad rows; `run` is undefined for a daemon. */
export function showLetters(run) {
  byId("letters-section").hidden = run === undefined;
  if (run === undefined) return;
  say(
    byId("letters-note"),
    run.dlq === "table" ? "“memwal dlq list CONFIG” shows every dead letter" : `dlq.mode = ${run.dlq}`,
  );
  byId("letters").hidden = !run.bad_batches.length;
  byId("letters-empty").hidden = run.bad_batches.length > 0;
  sync(byId("letters").tBodies[0], run.bad_batches, (batch) =>
    element(
      "tr",
      {},
      element("td", {}, timeOf(batch.time)),
      element("td", { class: "number" }, number(batch.batch_id)),
      element("td", { class: "number" }, number(batch.bad)),
      element("td", { class: "number" }, number(batch.letters)),
      element("td", { class: "text" }, batch.reasons),
    ),
  );
}

/** Requests to storage and their cost, where the process counts them. */
export function showRequests(requests) {
  byId("requests-section").hidden = !requests;
  if (!requests) return;
  const money = (value) =>
    value === null || value === undefined ? NONE : `${value.toFixed(value < 0.1 ? 4 : 2)} ${requests.currency}`;
  say(
    byId("requests-note"),
    `${money(requests.cost_per_hour)} per hour${requests.prices ? `, at ${requests.prices}` : ""}`,
  );
  sync(byId("requests").tBodies[0], requests.kinds, (each) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, each.kind),
      element("td", { class: "number" }, number(each.per_second)),
      element("td", { class: "number" }, number(each.total)),
      element("td", { class: "number" }, money(each.cost_per_hour)),
    ),
  );
}

/** Events: `events` by number. */
export function showEvents(events, message) {
  const ofDaemons = message.daemon_events ?? [];
  const newestFirst = [...events.values(), ...ofDaemons].sort((a, b) => b.time - a.time || b.number - a.number);
  byId("events-empty").hidden = newestFirst.length > 0;
  say(
    byId("events-note"),
    message.kind === "run" ? "of the driver and the newest of its daemons" : "",
  );
  sync(byId("events"), few("events", newestFirst), (event) =>
    element(
      "li",
      { "data-level": event.level },
      timeOf(event.time),
      element("span", { class: "kind" }, (event.event ?? event.level).replaceAll("_", " ")),
      element("span", { class: "text", title: event.daemon ? `${event.daemon}: ${event.text}` : event.text },
        named(event.text, message.regions)),
    ),
  );
}
