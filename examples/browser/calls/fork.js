/* Go on from a turn of a recorded call with other instructions, another voice or model, and hear both answers. */

import { bindDialog, element } from "../page.js";
import { ask, askJson } from "./access.js";
import { make } from "./shown.js";

/* How often it is looked whether the answer has come, and how many times. */
const LOOK_MS = 700;
const MOST_LOOKS = 170;

export class Fork {
  #looked = null; // the turn that is looked at, as the sound goes on
  #turn = null; // that of the dialog

  /* `base` is the address of the call; `hear(from, to)` plays a piece of it. */
  constructor(base, { hear }) {
    Object.assign(this, { base, hear });
    this.dialog = element("fork-dialog");
    bindDialog(this.dialog, { opener: element("fork"), closer: element("close-fork") });
    element("fork").onclick = () => this.begin(this.#looked);
    element("fork-form").onsubmit = (event) => {
      event.preventDefault();
      this.#go();
    };
  }

  /* The turn that is looked at: { place, turn }, or null. */
  select(turn) {
    this.#looked = turn;
  }

  begin(turn) {
    if (!turn) return;
    this.#turn = { ...turn };
    element("fork-title").textContent = `Go on from turn ${turn.place + 1} with…`;
    element("fork-asked").textContent = turn.turn.user?.text ?? "";
    element("fork-problem").textContent = "";
    element("fork-answers").replaceChildren();
    this.dialog.showModal();
  }

  async #go() {
    const asked = this.#turn;
    const { place, turn } = asked;
    const form = new FormData(element("fork-form"));
    const wanted = Object.fromEntries([...form].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));
    element("fork-go").disabled = true;
    element("fork-problem").textContent = "";
    element("fork-state").textContent = "It answers…";
    try {
      const response = await ask(new URL("fork", this.base), {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ turn: place + 1, ...wanted }),
      });
      const { id } = await response.json();
      const address = new URL(`../${encodeURIComponent(id)}/`, this.base);
      const answered = await this.#answerOf(address, place);
      if (asked !== this.#turn) return; // the dialog is about something else by now
      const label = Object.entries(wanted).map(([name, value]) => `${name}: ${value}`).join(", ");
      element("fork-answers").replaceChildren(
        this.#card("As it was", turn, () => this.hear(turn.answer.start_ms, turn.answer.end_ms)),
        this.#other(label || "Once more", answered, address),
      );
    } catch (error) {
      if (asked === this.#turn) element("fork-problem").textContent = error.message;
    } finally {
      element("fork-state").textContent = "";
      element("fork-go").disabled = false;
    }
  }

  /* The turn of the new call, once its answer has come. */
  async #answerOf(address, place) {
    for (let look = 0; look < MOST_LOOKS; look++) {
      const call = await askJson(new URL("call.json", address)).catch(() => null);
      const turn = call?.turns[Math.min(place, call.turns.length - 1)];
      if (turn?.finish_reason || turn?.error) return turn;
      await new Promise((go) => setTimeout(go, LOOK_MS));
    }
    throw new Error("The answer did not come.");
  }

  #other(label, turn, address) {
    const sound = new Audio();
    const play = async () => {
      if (!sound.src) sound.src = URL.createObjectURL(await (await ask(new URL("sound.wav", address))).blob());
      sound.currentTime = (turn.answer.start_ms ?? 0) / 1000;
      await sound.play();
    };
    this.dialog.addEventListener("close", () => sound.pause(), { once: true });
    const card = this.#card(label, turn, () => play().catch((error) => (element("fork-problem").textContent = error.message)));
    const link = make("a", "", "Open the new call");
    link.href = address.href.replace(/\/$/, "");
    card.append(link);
    return card;
  }

  #card(label, turn, hear) {
    const card = make("section", "answer-card");
    const text = turn.answer?.text || (turn.error?.message ?? "Nothing was answered.");
    card.append(make("h3", "", label), make("p", "", text));
    if (Number.isFinite(turn.answer?.start_ms)) {
      const button = make("button", "quiet", "Play");
      button.type = "button";
      button.setAttribute("aria-label", `Play: ${label}`);
      button.onclick = hear;
      card.append(button);
    }
    return card;
  }
}
