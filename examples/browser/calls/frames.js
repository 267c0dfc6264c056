/* The frames of a call on the wire, in their order: what is looked for is listed, and each opens to all that it says. */

import { LongList } from "./long-list.js";
import { make } from "./shown.js";

/* How long frames are looked through before the page gets its turn. */
const SLICE_MS = 12;
const SHOWN_LETTERS = 160;
const WAYS = { client: "↑", server: "↓" };

export class Frames {
  #all = [];
  #leftOut = 0;
  #texts = new Map();
  #open = new Set();
  #list;
  #search = 0;

  constructor(scroller, list, { filter, count }) {
    Object.assign(this, { filter, count });
    this.#list = new LongList(scroller, list, { render: (frame) => this.#render(frame), guess: 28 });
    filter.addEventListener("input", () => this.look());
  }

  /* `leftOut` frames beyond the limits of the server are not in the list. */
  show(frames, leftOut) {
    this.#all = frames;
    this.#leftOut = leftOut;
    this.look();
  }

  /* Show the first frame from a time on. */
  reveal(ms) {
    const place = this.#list.items.findIndex((frame) => frame.at_ms >= ms);
    if (place >= 0) this.#list.reveal(place);
  }

  async look() {
    const search = ++this.#search;
    const wanted = this.filter.value.trim().toLowerCase();
    const found = wanted ? [] : this.#all;
    let begun = performance.now();
    for (const frame of wanted ? this.#all : []) {
      if (this.#textOf(frame).toLowerCase().includes(wanted)) found.push(frame);
      if (performance.now() - begun < SLICE_MS) continue;
      await new Promise((go) => setTimeout(go));
      if (search !== this.#search) return; // something else is looked for by now
      begun = performance.now();
    }
    this.#list.show(found);
    const number = this.#all.length.toLocaleString();
    const shown = wanted ? `${found.length.toLocaleString()} of ${number}` : number;
    this.count.textContent = this.#leftOut ? `${shown}, ${this.#leftOut.toLocaleString()} left out` : shown;
  }

  #textOf(frame) {
    let text = this.#texts.get(frame);
    if (text === undefined) {
      const { at_ms: at, side, event, frame: message, ...rest } = frame;
      const { type = event, ...fields } = message ?? {};
      text = `${WAYS[side] ?? "·"} ${type} ${JSON.stringify({ ...fields, ...rest })}`;
      this.#texts.set(frame, text);
    }
    return text;
  }

  #render(frame) {
    const item = make("li");
    const details = make("details", frame.side === "client" ? "sent" : "");
    details.append(make("summary", "", `${(frame.at_ms / 1000).toFixed(2)} ${this.#textOf(frame).slice(0, SHOWN_LETTERS)}`));
    const fill = () => {
      if (details.childElementCount === 1) details.append(make("pre", "", JSON.stringify(frame, null, 2)));
    };
    if (this.#open.has(frame)) {
      details.open = true;
      fill();
    }
    details.addEventListener("toggle", () => {
      if (details.open) this.#open.add(frame);
      else this.#open.delete(frame);
      if (details.open) fill();
    });
    item.append(details);
    return item;
  }
}
