// The tables of a fleet. The daemon searches, sorts and cuts the list, and sends only what is shown.

import { badge } from "./regions.js";
import { NONE, byId, bytes, count, duration, element, number, say, sync } from "./text.js";

const SHOWN = 20;
const UP_FIRST = new Set(["name", "state"]);

export class Tables {
  /** `get`: asks for a path and returns its JSON, null if there is none. */
  constructor(get) {
    this.get = get;
    this.sort = "put";
    this.up = false;
    this.offset = 0;
    this.asked = 0;
    byId("tables-search").addEventListener("input", () => this.begin());
    byId("tables-form").addEventListener("submit", (event) => event.preventDefault());
    for (const button of document.querySelectorAll("#tables thead button")) {
      button.addEventListener("click", () => this.sortBy(button.dataset.sort));
    }
    byId("tables-before").addEventListener("click", () => this.begin(this.offset - SHOWN));
    byId("tables-after").addEventListener("click", () => this.begin(this.offset + SHOWN));
  }

  sortBy(sort) {
    this.up = sort === this.sort ? !this.up : UP_FIRST.has(sort);
    this.sort = sort;
    this.begin();
  }

  begin(offset = 0) {
    this.offset = Math.max(0, offset);
    return this.load();
  }

  /** Ask for the tables to show, and show them, unless something newer was asked for meanwhile. */
  async load() {
    const search = byId("tables-search").value;
    const asked = { search, sort: this.sort, up: this.up ? 1 : 0, offset: this.offset, limit: SHOWN };
    const turn = (this.asked += 1);
    const answer = await this.get(`tables?${new URLSearchParams(asked)}`);
    if (answer !== null && turn === this.asked) this.show(answer);
  }

  show({ total, found, offset, tables }) {
    for (const button of document.querySelectorAll("#tables thead button")) {
      const sorted = button.dataset.sort === this.sort;
      button.parentElement.setAttribute("aria-sort", !sorted ? "none" : this.up ? "ascending" : "descending");
    }
    say(byId("tables-note"), found === total ? count(total, "table") : `${number(found)} of ${count(total, "table")}`);
    const rows = tables.flatMap((table) => [
      { ...table, lag: duration(table.lag) },
      ...(table.error ? [{ why: table.error }] : []),
    ]);
    sync(byId("tables").tBodies[0], rows, (row) => (row.why ? whyRow(row.why) : tableRow(row)));
    byId("tables").hidden = !found;
    byId("tables-empty").hidden = found > 0;
    say(byId("tables-empty"), total ? "No table has a name like this." : "This daemon has no table yet.");
    this.offset = offset;
    byId("tables-pages").hidden = found <= SHOWN;
    say(byId("tables-range"), `${number(offset + 1)} to ${number(offset + tables.length)} of ${number(found)}`);
    byId("tables-before").disabled = offset === 0;
    byId("tables-after").disabled = offset + tables.length >= found;
  }
}

function tableRow(table) {
  const link = element("a", { href: `?table=${encodeURIComponent(table.name)}` }, table.name);
  const cell = (text, more = "") => element("td", { class: `number${more}` }, text);
  return element(
    "tr",
    { "data-state": table.state },
    element("th", { scope: "row" }, link),
    element("td", {}, badge(table.state)),
    cell(table.put ? number(table.put) : NONE),
    cell(table.unflushed ? bytes(table.unflushed) : NONE, " may-go"),
    cell(table.lag, " may-go"),
    cell(table.elsewhere ? `${table.regions} + ${table.elsewhere}` : table.regions || NONE),
    cell(number(table.rows), " may-go"),
  );
}

function whyRow(why) {
  return element("tr", { class: "why" }, element("td", { colspan: "7", class: "error" }, why));
}
