/* The list of recorded calls, newest first. */

import { element, Messages } from "../page.js";
import { askJson } from "./access.js";
import { clock, day, make } from "./shown.js";
import { LongList } from "./long-list.js";

const messages = new Messages(element("messages"));
const list = new LongList(element("list"), element("calls"), { render: entry, guess: 76 });
const search = element("search");
let calls = [];

try {
  const found = await askJson(new URL("calls", document.baseURI), { headers: { Accept: "application/json" } });
  calls = found.calls.toSorted((one, other) => String(other.started).localeCompare(String(one.started)));
  look();
} catch (error) {
  element("about").textContent = "";
  messages.show("calls", error.message, { label: "Try again", action: () => location.reload() });
}

search.oninput = look;

function look() {
  const wanted = search.value.trim().toLowerCase();
  const found = calls.filter((call) => !wanted || JSON.stringify(call).toLowerCase().includes(wanted));
  list.show(found);
  const number = calls.length === 1 ? "1 call" : `${calls.length.toLocaleString()} calls`;
  element("about").textContent = wanted ? `${found.length.toLocaleString()} of ${number}` : number;
}

function entry({ id, started, last_written: written, duration_ms: told, model, key, kind, turns, first_words: words }) {
  const item = make("li");
  const link = make("a", "entry");
  link.href = `calls/${encodeURIComponent(id)}`;
  const count = Number.isFinite(turns) ? (turns === 1 ? "1 turn" : `${turns} turns`) : "";
  const facts = [count, kind, model, key && `key ${key}`].filter(Boolean).join(" · ");
  const time = make("time", "", day(started));
  time.dateTime = started;
  link.append(make("span", "first-words", words || "No words"), make("span", "took", clock(told ?? Date.parse(written) - Date.parse(started))), time, make("span", "facts", facts));
  if (!words) link.firstChild.classList.add("none");
  item.append(link);
  return item;
}
