/* The player of a call: its sound, its wave and its words move together, by the pointer, by keys, and as it sounds. The page
   of a recorded call and a shared file have the same elements for it. */

import { element } from "../page.js";
import { clock } from "./shown.js";
import { Transcript, beginOf, endOf } from "./transcript.js";
import { Wave } from "./wave.js";

/* How far the arrow keys go. */
const STEP_MS = 5000;

export class Player {
  #selected = -1;
  #stopAt = null; // where a piece that is heard alone ends
  #length = 0;

  /* `chosen(turn, place)` is told which turn is looked at; `link` and `fork` are those of the transcript. */
  constructor({ chosen, ...actions }) {
    this.chosen = chosen;
    this.sound = element("sound");
    this.wave = new Wave(element("wave"));
    this.transcript = new Transcript(element("conversation"), element("turns"), { jump: (place, ms) => this.jump(ms, place), ...actions });
    this.#bindSound();
    this.#bindWave();
    addEventListener("keydown", (event) => this.#key(event));
  }

  show(turns, lengthMs) {
    this.#length = lengthMs;
    element("length").textContent = clock(lengthMs);
    element("wave").setAttribute("aria-valuemax", Math.round(lengthMs / 1000));
    this.transcript.show(turns);
    this.wave.show(turns, lengthMs);
    element("nothing-said").hidden = turns.length > 0;
    this.#select(0);
  }

  get turn() {
    return this.transcript.turns[this.#selected];
  }

  get nowMs() {
    return this.sound.currentTime * 1000;
  }

  jump(ms, place = this.transcript.placeAt(ms)) {
    this.#stopAt = null;
    if (!element("player").hidden) this.sound.currentTime = Math.min(ms, this.#length) / 1000;
    this.#select(place, { reveal: true });
    this.#tell(ms);
  }

  hear(from, to) {
    this.jump(from);
    this.#stopAt = to;
    this.sound.play();
  }

  #select(place, { reveal = false } = {}) {
    const turn = this.transcript.turns[place];
    if (!turn) return;
    const isNew = place !== this.#selected;
    this.#selected = place;
    this.transcript.select(place, { reveal });
    if (isNew) this.chosen(turn, place);
  }

  #tell(ms) {
    const seconds = Math.round(ms / 1000);
    if (element("now").textContent !== clock(ms)) element("now").textContent = clock(ms);
    const slider = element("wave");
    if (slider.getAttribute("aria-valuenow") !== String(seconds)) {
      slider.setAttribute("aria-valuenow", seconds);
      slider.setAttribute("aria-valuetext", `${clock(ms)} of ${clock(this.#length)}`);
    }
    this.wave.at(ms, this.turn ? [beginOf(this.turn), endOf(this.turn)] : null);
    this.transcript.mark(ms);
  }

  #tick() {
    const ms = this.nowMs;
    if (this.#stopAt !== null && ms >= this.#stopAt) this.sound.pause();
    const place = this.transcript.placeAt(ms);
    if (place !== this.#selected && !this.sound.paused) this.#select(place, { reveal: this.transcript.follows });
    this.#tell(ms);
    if (!this.sound.paused) requestAnimationFrame(() => this.#tick());
  }

  #toggle() {
    if (this.sound.paused) this.sound.play().catch(() => {});
    else this.sound.pause();
  }

  #bindSound() {
    const { sound } = this;
    for (const kind of ["play", "pause"]) {
      sound.addEventListener(kind, () => {
        element("play").setAttribute("aria-label", sound.paused ? "Play" : "Pause");
        element("play").querySelector("use").setAttribute("href", sound.paused ? "#i-play" : "#i-pause");
        requestAnimationFrame(() => this.#tick());
      });
    }
    for (const kind of ["seeked", "timeupdate", "loadedmetadata"]) sound.addEventListener(kind, () => this.#tell(this.nowMs));
    element("play").onclick = () => this.#toggle();
    element("rate").onchange = () => (sound.playbackRate = Number(element("rate").value));
  }

  #bindWave() {
    const slider = element("wave");
    slider.addEventListener("pointerdown", (event) => {
      slider.setPointerCapture(event.pointerId);
      this.jump(this.wave.timeAt(event.clientX));
    });
    slider.addEventListener("pointermove", (event) => {
      if (slider.hasPointerCapture(event.pointerId)) this.jump(this.wave.timeAt(event.clientX));
    });
  }

  #keys = {
    ArrowLeft: () => this.jump(Math.max(0, this.nowMs - STEP_MS)),
    ArrowRight: () => this.jump(this.nowMs + STEP_MS),
    Home: () => this.jump(0),
    End: () => this.jump(this.#length),
    ",": () => this.#word(-1),
    ".": () => this.#word(1),
    j: () => this.#turn(1),
    k: () => this.#turn(-1),
    " ": () => this.#toggle(),
  };

  #word(way) {
    const ms = this.transcript.wordFrom(this.nowMs, way);
    if (ms !== null) this.jump(ms);
  }

  #turn(way) {
    const { turns } = this.transcript;
    const next = Math.min(turns.length - 1, Math.max(0, this.#selected + way));
    if (turns[next]) this.jump(beginOf(turns[next]), next);
  }

  #key(event) {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || document.querySelector("dialog[open]")) return;
    if (target.closest("input, select, textarea") || (key === " " && target.closest("button, a, summary"))) return;
    if ((key === "Home" || key === "End") && target !== element("wave")) return; // elsewhere they scroll
    if (!this.#length || !Object.hasOwn(this.#keys, key)) return;
    event.preventDefault();
    this.#keys[key]();
  }
}

/* On a small screen one part is shown at a time. */
export function showPane(name) {
  document.body.dataset.pane = name;
  element(`pane-${name}`).checked = true;
}

export function bindPanes() {
  for (const radio of document.querySelectorAll("input[name=pane]")) radio.onchange = () => showPane(radio.value);
}
