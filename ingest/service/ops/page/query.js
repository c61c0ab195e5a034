// The query box: one read, its rows as a table; errors are shown in place.

import { byId, count, duration, element, number, say, sync } from "./text.js";

const COLUMNS_SHOWN = 12;

export class QueryBox {
  /** `ask`: posts JSON to a path and returns the answer. */
  constructor(ask) {
    this.ask = ask;
    this.running = false;
    byId("query").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    window.addEventListener("resize", scrollHint);
  }

  /** Fit the form to the table; `told` is null while no query can be answered. */
  describe(told) {
    byId("query").hidden = told === null;
    byId("query-empty").hidden = told !== null;
    if (told === null) return;
    const near = told.key.length > 0 && told.vectors.length > 0;
    byId("words-field").hidden = told.texts.length === 0;
    byId("near-field").hidden = !near;
    options("query-words-column", told.texts);
    options("query-near-column", near ? told.vectors : []);
    byId("query-near").placeholder = told.key.join(",");
    byId("query-limit").max = String(told.rows_max);
    byId("query-filter").placeholder = example(told.columns);
    const listed = told.columns.slice(0, COLUMNS_SHOWN).map((column) => `${column.name} ${column.type}`);
    const more = told.columns.length - COLUMNS_SHOWN;
    const missing = [];
    if (!told.texts.length) missing.push("no full-text index (no search by words)");
    if (!told.vectors.length) missing.push("no vector column");
    else if (!told.key.length) missing.push("no key (no row to take a vector from)");
    const lacks = missing.length ? ` This table has ${missing.join(" and ")}.` : "";
    say(byId("query-columns"), `Columns: ${listed.join(", ")}${more > 0 ? `, and ${more} more` : ""}.${lacks}`);
  }

  async run() {
    if (this.running) return;
    this.running = true;
    say(byId("query-status"), "Reading …");
    byId("query-error").hidden = true;
    try {
      const { status, body } = await this.ask("query", this.request());
      if (status === 200) this.show(body);
      else this.fail(body?.error?.message ?? body?.error ?? `answered with status ${status}`);
    } catch (error) {
      this.fail(`no answer: ${error.message}`);
    } finally {
      this.running = false;
    }
  }

  request() {
    const text = (id) => byId(id).value.trim();
    const asked = { level: text("query-level"), limit: Number(text("query-limit")) };
    if (text("query-filter")) asked.filter = text("query-filter");
    if (text("query-words"))
      Object.assign(asked, { words: text("query-words"), words_column: text("query-words-column") });
    if (text("query-near")) Object.assign(asked, { near: text("query-near"), near_column: text("query-near-column") });
    return asked;
  }

  show(answer) {
    const took = duration(answer.seconds, true);
    const how = { scan: "filter", match: "words", search: "vector", hybrid: "vector and words" }[answer.read];
    const found = answer.rows.length ? count(answer.rows.length, "row") : "No row passes";
    const places = answer.columns.map((_, at) => at);
    const vectors = places.filter((at) => answer.columns[at].type.startsWith("vector["));
    const shown = vectors.length < places.length ? places.filter((at) => !vectors.includes(at)) : places;
    const hidden = places.filter((at) => !shown.includes(at)).map((at) => answer.columns[at].name);
    const without = hidden.length && answer.rows.length ? ` Vectors are hidden: ${hidden.join(", ")}.` : "";
    say(byId("query-status"), `${found} in ${took}, by ${how}, at level ${answer.level}.${without}`);
    const table = byId("query-rows");
    table.hidden = !answer.rows.length;
    const kinds = answer.columns.map((column) => (column.number ? "number" : null));
    const names = shown.map((at) =>
      element("th", { scope: "col", class: kinds[at], title: answer.columns[at].type }, answer.columns[at].name),
    );
    table.tHead.replaceChildren(element("tr", {}, ...names));
    sync(table.tBodies[0], answer.rows, (row) => element("tr", {}, ...shown.map((at) => cellOf(row[at], kinds[at]))));
    scrollHint();
  }

  fail(message) {
    say(byId("query-status"), "");
    byId("query-rows").hidden = true;
    byId("query-error").hidden = false;
    say(byId("query-error"), message);
    scrollHint();
  }
}

/** Say that the rows are wider than the window: phones show no scroll bar. */
function scrollHint() {
  const { scrollWidth, clientWidth } = byId("query-rows").parentElement;
  byId("query-scroll").hidden = scrollWidth <= clientWidth;
}

function cellOf(cell, kind) {
  return cell === null ? element("td", { class: "null" }, "null") : element("td", { class: kind }, cell);
}

function options(id, names) {
  const select = byId(id);
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
}

function example(columns) {
  const numeric = columns.find((column) => /^(u?int|float|double)/.test(column.type));
  if (numeric !== undefined) return `${numeric.name} > ${number(10)}`;
  return columns.length ? `${columns[0].name} is not null` : "";
}
