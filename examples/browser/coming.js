/* The language model that is to answer here: how far its fetch is, and a button that begins it. */

import { element } from "./page.js";
import { isHere } from "./who.js";

const LOOK_MS = 2000;

export class Coming {
  #timer;

  /* `base` is the address of the page; `complain` is called with what the server says if it does not fetch. */
  constructor(base, complain) {
    this.base = base;
    this.complain = complain;
    element("coming-fetch").onclick = () => this.#begin();
  }

  /* Show how it goes, now and as long as something happens. */
  async look() {
    clearTimeout(this.#timer);
    try {
      this.#show((await (await fetch(new URL("health", this.base))).json()).parts?.llm?.coming);
    } catch {
      this.#show(undefined); // the connection's own message says that the server is away
    }
  }

  #show(coming) {
    const { state, bytes_done: done, bytes_total: total, can_begin: canBegin } = coming ?? {};
    const moves = state === "fetching" || state === "loading";
    const offered = Boolean(canBegin) && isHere(location.hostname);
    element("coming").hidden = !moves && !offered;
    element("coming").classList.toggle("moves", moves); // then it takes the place of the line that no model answers
    element("coming-progress").hidden = !moves;
    if (total) element("coming-progress").value = done / total;
    else element("coming-progress").removeAttribute("value");
    const how = moves ? `Rules answer until the language model is ${state === "loading" ? "loaded" : "fetched"}.` : "";
    const bytes = moves && total ? ` ${inGigabytes(done)} of ${inGigabytes(total)} GB` : "";
    if (element("coming-how").textContent !== how + bytes) element("coming-how").textContent = how + bytes;
    element("coming-fetch").hidden = !offered || moves;
    // Also while the first view is gone.
    element("parts-coming").textContent = moves && total ? ` · model ${Math.floor((100 * done) / total)} %` : "";
    if (moves) this.#timer = setTimeout(() => this.look(), LOOK_MS);
  }

  async #begin() {
    const answer = await fetch(new URL("fetch_llm", this.base), { method: "POST" }).catch(() => null);
    if (answer && !answer.ok) this.complain((await answer.json()).error);
    await this.look();
  }
}

function inGigabytes(bytes) {
  return (bytes / 1e9).toFixed(1);
}
