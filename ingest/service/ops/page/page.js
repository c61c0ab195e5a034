// Asks the process for its message, live/events, and shows it. The README of ingest/service/ops has the shape of the message.

import { Plots, Samples } from "./draw.js";
import { QueryBox } from "./query.js";
import { showCommits, showEvents, showLetters, showRequests, toggleLists } from "./lists.js";
import { named, showRegions } from "./regions.js";
import { byId, duration, element, say, sync } from "./text.js";
import { Tables } from "./tables.js";
import { showFlow, showLevels } from "./tiles.js";

const LOST_AFTER = 4000;
const AGAIN_AFTER = 2000;
const POLL_EVERY = 5000;
const TABLES_EVERY = 2000;

const samples = new Samples();
const query = new QueryBox(post);
const tables = new Tables(get);
/** The table of this page, if the process has several, and the parameter that names it. */
const name = new URLSearchParams(location.search).get("table");
const ofTable = name === null ? "" : `?table=${encodeURIComponent(name)}`;
const events = new Map();
let plots = null;
let newest = null;
let heard = 0;
let token = sessionStorage.getItem("memwal-token") ?? "";

// ---- asking ---------------------------------------------------------------------------------------------------------

function headers(more = {}) {
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

async function get(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" }).catch(() => null);
  return answer?.ok ? answer.json() : null;
}

async function post(path, body) {
  const sent = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  const answer = await fetch(`${path}${ofTable}`, sent);
  if (answer.status === 401) askForToken();
  return { status: answer.status, body: await answer.json().catch(() => null) };
}

/** Read events until the stream ends; return how long to wait before the next try. */
async function listen() {
  const answer = await fetch(`live/events${ofTable}`, { headers: headers(), cache: "no-store" });
  if (answer.status === 403 && token && name === null) return onlyTables();
  if (answer.status === 401 || (answer.status === 403 && token)) {
    await askForToken();
    return 0;
  }
  if (answer.status === 400) say(byId("table"), (await answer.json()).error.message);
  if (answer.status === 503) return poll();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return AGAIN_AFTER;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) take(JSON.parse(part.replace(/^data: /, "")));
  }
}

/** The token is for some tables: the process shows those, and nothing of itself. */
async function onlyTables() {
  document.body.classList.add("fleet", "limited");
  byId("main").hidden = false;
  byId("links").hidden = true;
  say(byId("table"), "the tables of your token");
  await tables.load();
  return TABLES_EVERY;
}

/** Ask once: too many pages are open for a stream of its own. */
async function poll() {
  const answer = await fetch(`live${ofTable}`, { headers: headers(), cache: "no-store" });
  if (answer.ok) take(await answer.json());
  return POLL_EVERY;
}

function take(message) {
  if (message.error !== undefined) return;
  if (message.whole) events.clear();
  if (message.fleet !== undefined && newest === null) tables.load();
  newest = message;
  heard = Date.now();
  samples.take(message.history, message.whole);
  for (const event of message.events) events.set(event.number, event);
  for (const old of [...events.keys()].sort((a, b) => b - a).slice(100)) events.delete(old);
  if (message.query !== undefined) query.describe(message.query);
  show();
}

function askForToken() {
  const form = byId("token-form");
  say(byId("token-error"), token ? "This process refuses that token." : "");
  form.hidden = false;
  byId("main").hidden = true;
  byId("token").focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      token = byId("token").value.trim();
      sessionStorage.setItem("memwal-token", token);
      byId("token").value = "";
      form.hidden = true;
      resolve();
    };
  });
}

// ---- showing --------------------------------------------------------------------------------------------------------

function show() {
  byId("main").hidden = false;
  document.body.classList.toggle("fleet", newest.fleet !== undefined);
  byId("back").hidden = name === null;
  for (const link of document.querySelectorAll("#links .of-table")) link.search = ofTable;
  say(byId("kind"), newest.kind);
  say(byId("table"), newest.name ? `${newest.name}, ${newest.table}` : newest.table);
  showHealth(newest.health);
  showLevels(newest);
  showFlow(newest);
  plots ??= new Plots(newest.kind);
  plots.show(samples.lists);
  showRegions(newest);
  showCommits(newest);
  showLetters(newest.run);
  showRequests(newest.requests);
  showEvents(events, newest);
  const up = `${newest.kind === "run" ? "run" : "daemon"}, process ${newest.pid}, up ${duration(newest.uptime)}`;
  say(byId("process"), `${up}${newest.base_version ? `, base version ${newest.base_version}` : ""}`);
  byId("links").hidden = token !== "";
  showConnection();
}

function showHealth(health) {
  const lost = isLost();
  const ago = duration((Date.now() - heard) / 1e3);
  const shown = lost
    ? {
        state: "failing",
        title: "No answer from this process",
        text: `Its last answer came ${ago} ago; what is below is as of then.`,
        todo: "Check that the process runs. This page connects again by itself.",
        findings: [],
      }
    : health;
  byId("health").dataset.state = shown.state;
  say(byId("health-title"), shown.title);
  say(byId("health-text"), named(shown.text, newest.regions));
  byId("health-todo").hidden = !shown.todo;
  say(byId("health-todo").lastElementChild, shown.todo);
  byId("findings").hidden = !shown.findings.length;
  sync(byId("findings"), shown.findings, (finding) =>
    element(
      "li",
      { "data-state": finding.state },
      element("strong", {}, `${finding.title}.`),
      ` ${named(finding.text, newest.regions)} ${finding.todo}`,
    ),
  );
  say(byId("announce"), lost ? shown.title : `${shown.title}${shown.state === "healthy" ? "" : `. ${shown.todo}`}`);
  const of = name === null ? "memwal" : `${name} – memwal`;
  document.title = `${{ healthy: "●", busy: "◌", warning: "▲", failing: "■" }[shown.state]} ${shown.title} – ${of}`;
}

// ---- the connection -------------------------------------------------------------------------------------------------

function isLost() {
  return Date.now() - heard > (newest === null ? Infinity : LOST_AFTER + (polling ? POLL_EVERY : 0));
}

let polling = false;

function showConnection() {
  const lost = newest !== null && isLost();
  byId("connection").dataset.state = newest === null ? "waiting" : lost ? "lost" : "live";
  const waiting = document.body.classList.contains("limited") ? "every 2 s" : "connecting";
  say(byId("connection-text"), newest === null ? waiting : lost ? "no answer" : polling ? "every 5 s" : "live");
  document.body.classList.toggle("lost", lost);
  if (lost) showHealth(newest.health);
}

async function run() {
  for (;;) {
    let pause = AGAIN_AFTER;
    try {
      pause = await listen();
      polling = pause === POLL_EVERY;
    } catch {
      polling = false;
    }
    showConnection();
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

toggleLists(show);
setInterval(showConnection, 1000);
setInterval(() => {
  if (newest?.fleet !== undefined && !document.hidden && !isLost()) tables.load();
}, TABLES_EVERY);
run();
