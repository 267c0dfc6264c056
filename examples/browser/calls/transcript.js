/* What was said in a call, turn by turn. A click on a word or a turn asks to hear it (`jump(place, ms)`), words that sound are
   marked, and what was not heard of an answer that was cut is struck through. */

import { placesOf, rangeOf } from "../../widget/spoken-word.js";
import { LongList } from "./long-list.js";
import { clock, duration, make } from "./shown.js";

const CAN_MARK = "highlights" in (globalThis.CSS ?? {}) && typeof Highlight !== "undefined";
const SIDES = ["user", "answer"];
/* A turn is scrolled to while it sounds, unless the person has scrolled since a moment ago. */
const PATIENT_MS = 5000;
/* So soon after the begin of a word, it is the one before that is meant. */
const AT_BEGIN_MS = 150;

export class Transcript {
  #list;
  #marked = "";
  #selected = -1;
  #begins = []; // in order, also where turns overlap
  #scrolledAt = -Infinity;
  #words = new WeakMap(); // of each side of a turn: where its words stand

  /* `jump(place, ms)`, `link(place)` and `fork(place)` are called for what the person chooses. Without `link` there is no
     button for that. */
  constructor(scroller, list, { jump, link, fork }) {
    Object.assign(this, { jump, link, fork, scroller });
    this.canFork = false;
    this.#list = new LongList(scroller, list, { render: (turn, place) => this.#render(turn, place), guess: 150 });
    list.addEventListener("click", (event) => this.#click(event));
    for (const kind of ["wheel", "touchmove", "pointerdown"]) {
      scroller.addEventListener(kind, () => (this.#scrolledAt = performance.now()), { passive: true });
    }
  }

  get turns() {
    return this.#list.items;
  }

  show(turns) {
    let last = 0;
    this.#begins = turns.map((turn) => (last = Math.max(last, beginOf(turn))));
    this.#list.show(turns);
  }

  /* The last turn that has begun by then, or the first. */
  placeAt(ms) {
    let [low, high] = [0, Math.max(0, this.turns.length - 1)];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.#begins[middle] <= ms) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  select(place, { reveal = false } = {}) {
    this.#list.node(this.#selected)?.removeAttribute("aria-current");
    this.#selected = place;
    this.#list.node(place)?.setAttribute("aria-current", "true");
    if (reveal && !this.#list.isSeen(place)) this.#list.reveal(place);
  }

  /* Whether the turn that sounds may be scrolled to. */
  get follows() {
    return performance.now() - this.#scrolledAt > PATIENT_MS;
  }

  /* Where the next word (`way` 1) or the one before (-1) begins, of both sides; null without one. */
  wordFrom(ms, way) {
    const here = this.placeAt(ms);
    const starts = [];
    for (let place = Math.max(0, here - 2); place <= Math.min(this.turns.length - 1, here + 2); place++) {
      for (const side of SIDES) for (const word of this.turns[place][side]?.words ?? []) starts.push(word.start_ms);
    }
    starts.sort((one, other) => one - other);
    // From within a word one comes to its begin first.
    return (way > 0 ? starts.find((start) => start > ms + 1) : starts.findLast((start) => start < ms - AT_BEGIN_MS)) ?? null;
  }

  /* Mark the words that sound at a time of the call. */
  mark(ms) {
    if (!CAN_MARK) return;
    const here = this.placeAt(ms);
    const found = [];
    for (let place = Math.max(0, here - 1); place <= Math.min(here + 1, this.turns.length - 1); place++) {
      for (const side of SIDES) {
        const words = this.turns[place][side]?.words ?? [];
        const at = words.findLastIndex((word) => word.start_ms <= ms);
        if (at >= 0 && words[at].end_ms + 120 > ms && isHeard(this.turns[place], side, words[at])) found.push([place, side, at]);
      }
    }
    const shown = found.filter(([place]) => this.#list.node(place));
    const key = String(shown);
    if (key === this.#marked && shown.every(([place]) => this.#list.node(place).isConnected)) return;
    this.#marked = key;
    const ranges = shown.map(([place, side, at]) => {
      const where = this.#placesOf(this.turns[place][side])[at];
      const node = this.#list.node(place).querySelector(`.${side} .words`);
      return where && node ? rangeOf(node, ...where) : null;
    });
    CSS.highlights.set("spoken", new Highlight(...ranges.filter(Boolean)));
  }

  #placesOf(said) {
    let places = this.#words.get(said);
    if (!places) this.#words.set(said, (places = placesOf(said.words ?? [], said.text ?? "")));
    return places;
  }

  #click(event) {
    const item = event.target.closest("li[data-place]");
    if (!item || event.target.closest("summary, pre, a")) return;
    const place = Number(item.dataset.place);
    const button = event.target.closest("button");
    if (button?.name === "link") return this.link(place);
    if (button?.name === "fork") return this.fork(place);
    if (!button && String(getSelection())) return; // it is being copied
    const words = event.target.closest(".words");
    this.jump(place, words ? this.#timeOfWord(place, words, event) : beginOf(this.turns[place]));
  }

  /* When the word begins that lies under the pointer. */
  #timeOfWord(place, node, { clientX: x, clientY: y }) {
    const said = this.turns[place][node.closest(".answer") ? "answer" : "user"];
    const start = said.start_ms ?? beginOf(this.turns[place]);
    const caret = document.caretPositionFromPoint?.(x, y);
    const range = caret ? null : document.caretRangeFromPoint?.(x, y);
    const [text, offset] = caret ? [caret.offsetNode, caret.offset] : [range?.startContainer, range?.startOffset];
    if (!text || !node.contains(text)) return start;
    const before = document.createRange();
    before.setStart(node, 0);
    before.setEnd(text, offset);
    const letters = String(before).length;
    const at = this.#placesOf(said).findLastIndex((where) => where && where[0] <= letters);
    return at >= 0 ? said.words[at].start_ms : start;
  }

  #render(turn, place) {
    const item = make("li", "turn");
    if (place === this.#selected) item.setAttribute("aria-current", "true");
    const head = make("div", "head");
    const stamp = make("button", "stamp", clock(beginOf(turn)));
    stamp.type = "button";
    stamp.title = "Play from here";
    stamp.setAttribute("aria-label", `Turn ${place + 1}: play from ${clock(beginOf(turn))}`);
    head.append(stamp, make("span", "gap"));
    if (this.link) head.append(iconButton("link", "Copy a link to this turn"));
    if (this.canFork) head.append(iconButton("fork", "Go on from here with…"));
    item.append(head);
    if (turn.user?.text) item.append(said("user", "you", "You: ", [turn.user.text, ""]));
    const { answer } = turn;
    const tools = turn.tools ?? [];
    if (answer?.text || tools.length || turn.error) {
      const box = said("answer", "server", "Server: ", this.#heardAndNot(turn));
      for (const tool of tools) box.append(call(tool));
      const notes = notesOf(turn);
      if (notes) box.append(make("p", "note", notes));
      box.dataset.state = turn.error ? "failed" : isCut(turn) ? "stopped" : "done";
      item.append(box);
    }
    return item;
  }

  /* The text of an answer, in what was heard and what was not. */
  #heardAndNot(turn) {
    const { answer } = turn;
    const text = answer?.text ?? "";
    const words = answer?.words ?? [];
    if (!isCut(turn) || words.length === 0) return [text, ""];
    // The words may be those alone that were heard.
    const heard = words.filter((word) => isHeard(turn, "answer", word)).length;
    const end = this.#placesOf(answer).slice(0, heard).findLast(Boolean)?.[1] ?? 0;
    return [text.slice(0, end), text.slice(end)];
  }
}

/* When a turn begins: with the first sound of either side, or, where all is text, with the first that is known of it. */
export function beginOf({ user, answer, times }) {
  const first = Math.min(user?.start_ms ?? Infinity, answer?.start_ms ?? Infinity, times?.request_started ?? Infinity);
  if (first < Infinity) return first;
  const known = Object.values(times ?? {});
  return known.length ? Math.min(...known) : 0;
}

export function endOf(turn) {
  return Math.max(...SIDES.map((side) => turn[side]?.end_ms ?? 0), beginOf(turn));
}

const isCut = ({ answer }) => Number.isFinite(answer?.cut_ms);

function isHeard(turn, side, word) {
  return side === "user" || !isCut(turn) || word.start_ms < (turn.answer.end_ms ?? 0);
}

function said(side, kind, who, [heard, unheard]) {
  const box = make("div", `said ${kind} ${side}`);
  const words = make("p", "words");
  words.append(make("span", "", heard));
  if (unheard) {
    const rest = make("del", "", unheard);
    rest.title = "This was not heard";
    words.append(rest);
  }
  box.append(make("span", "for-readers", who), words);
  return box;
}

function call({ name, arguments: given, result, error }) {
  const box = make("details", "call");
  box.append(make("summary", "", name ?? "tool"));
  for (const [title, value] of [["Arguments", given], ["Result", result], ["Error", error]]) {
    if (value === undefined || value === null) continue;
    box.append(make("p", "note", title), make("pre", "", typeof value === "string" ? value : JSON.stringify(value, null, 2)));
  }
  return box;
}

function notesOf(turn) {
  const { answer, finish_reason: reason, error, user } = turn;
  const notes = [];
  if (Number.isFinite(user?.end_ms) && answer?.start_ms > user.end_ms) notes.push(`first sound after ${duration(answer.start_ms - user.end_ms)}`);
  if (isCut(turn)) notes.push(`cut after ${duration(Math.max(0, answer.end_ms - answer.start_ms))}`);
  else if (reason && reason !== "stop") notes.push(String(reason));
  if (error) notes.push(typeof error === "string" ? error : (error.message ?? error.code ?? JSON.stringify(error)));
  return notes.join(" · ");
}

function iconButton(name, title) {
  const button = make("button", "icon small");
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  icon.append(use);
  Object.assign(button, { type: "button", name, title });
  button.setAttribute("aria-label", title);
  button.append(icon);
  return button;
}
