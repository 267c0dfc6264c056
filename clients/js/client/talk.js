/* What the microphone hears, on its way to the server. Two ways: a button that is held (or tapped, to begin and to end),
   and an open microphone, where the server notices by itself who speaks. Events:

   change                        something that the page shows is different: `phase`, `muted`
   turn    { turn }              a turn of the button began
   level   { peak }              every 20 ms
   problem { error }             the microphone cannot be had
   network { state }             "slow": what is said arrives late; "paused": it is not sent; "well" */

import { bytesOf } from "./frames.js";

/* A shorter press is a tap, which begins a turn that the next tap ends. */
const TAP_MS = 280;
/* What is in the pipeline when the button is let go belongs to the turn. */
const TAIL_CHUNKS = 3;
const TAIL_MS = 1000;
const SLOW_SECONDS = 1.5;
const PAUSED_SECONDS = 15;
/* Of what was sent, so much is remembered to find what the server means by a place in the audio. */
const REMEMBERED_CHUNKS = 3000;

export class Talk extends EventTarget {
  mode = "hold"; // or "open"
  phase = "off"; // off | opening | talking (a turn of the button) | listening (an open microphone)
  muted = false;
  #turn = null;
  #tail = 0;
  #pressedAt = null;
  #network = "well";
  #remembered = [];
  #sentMs = 0;

  constructor({ sound, microphone, session, conversation }) {
    super();
    Object.assign(this, { sound, microphone, session, conversation });
    this.devices = {};
    microphone.addEventListener("chunk", ({ detail }) => this.#chunk(detail));
    microphone.addEventListener("lost", () => this.#fail(new DOMException("the microphone went away", "LostError")));
  }

  /* The button goes down, `at` the event's own time: opening a microphone can keep the page from the next event for a
     while, and a tap is one all the same. */
  press(at) {
    if (this.mode === "open") return this.phase === "off" ? this.#start("listening") : this.stop();
    if (this.phase !== "off") return this.#endTurn(); // the second tap
    this.#pressedAt = at;
    return this.#start("talking");
  }

  /* The button goes up. */
  release(at) {
    if (this.mode === "open" || this.#pressedAt === null) return;
    const tapped = at - this.#pressedAt < TAP_MS;
    this.#pressedAt = null;
    if (tapped) return; // goes on until the next tap
    if (this.phase === "opening") this.#become("off"); // the question for the permission took the finger off
    else this.#endTurn();
  }

  /* Close the microphone; a turn of the button is sent as far as it was said. */
  stop() {
    if (this.phase === "talking") this.#endTurn(0);
    this.#pressedAt = null;
    this.microphone.close();
    this.#become("off");
  }

  mute(muted) {
    this.muted = muted;
    this.microphone.muted = muted;
    this.#tell("change");
  }

  /* Open the microphone again, with the devices of now. */
  async reopen() {
    if (!this.microphone.isOpen) return;
    try {
      await this.microphone.open(this.sound.context, this.devices);
      this.microphone.muted = this.muted;
      this.#tell("change");
    } catch (error) {
      this.#fail(error);
    }
  }

  /* A new session counts its audio from nothing. */
  forgetPlaces() {
    this.#sentMs = 0;
    this.#remembered = [];
  }

  /* When the audio up to `audioMs` was spoken, on the clock of performance.now(); null where nobody remembers. */
  spokenAt(audioMs) {
    const found = this.#remembered.find(({ endMs }) => endMs >= audioMs);
    return found ? found.capturedAt - (found.endMs - audioMs) : null;
  }

  /* The samples that were sent between two places in the audio. */
  samplesBetween(startMs, endMs) {
    return this.#remembered.filter((one) => one.endMs > startMs && one.endMs <= endMs).map(({ samples }) => samples);
  }

  async #start(phase) {
    this.#become("opening");
    try {
      const context = await this.sound.wake();
      if (!this.microphone.isOpen) await this.microphone.open(context, this.devices);
      await this.sound.running();
    } catch (error) {
      return this.#fail(error);
    }
    if (this.phase !== "opening") {
      if (this.mode === "open") this.microphone.close();
      return;
    }
    this.microphone.muted = phase === "listening" && this.muted;
    if (phase === "talking") {
      this.#turn = this.conversation.begin("spoken");
      this.dispatchEvent(new CustomEvent("turn", { detail: { turn: this.#turn } }));
    }
    this.#become(phase);
  }

  #endTurn(tail = TAIL_CHUNKS) {
    if (this.phase === "opening") return this.#become("off");
    if (this.phase !== "talking") return;
    const turn = this.#turn;
    if (this.#tail === 0) this.conversation.endSpeech(turn, performance.now());
    else if (tail > 0) return; // it is ending
    if (tail === 0) return this.#finishTurn(new Uint8Array(0));
    this.#tail = tail;
    // A browser that was interrupted by a call gives no more sound; the turn ends all the same.
    setTimeout(() => this.#turn === turn && this.#finishTurn(new Uint8Array(0)), TAIL_MS);
  }

  #finishTurn(payload) {
    const turn = this.#turn;
    this.#turn = null;
    this.#tail = 0;
    if (payload.length === 0 && !this.session.hasBegun(turn.number)) this.conversation.fail(turn, "empty_input");
    else this.session.sendChunk({ modality: "audio", payload, endOfInput: true, turn: turn.number });
    this.#become("off");
  }

  #chunk({ samples, peak, capturedAt }) {
    const sending = this.phase === "talking" || this.phase === "listening";
    this.dispatchEvent(new CustomEvent("level", { detail: { peak: this.muted || !sending ? 0 : peak } }));
    if (!sending) return;
    this.#watchNetwork(samples.length);
    const payload = bytesOf(samples);
    const turn = this.#turn;
    if (turn && this.#tail > 0 && --this.#tail === 0) {
      this.conversation.keepSound(turn, "user", samples);
      return this.#finishTurn(payload);
    }
    if (this.#network === "paused") return;
    if (!this.session.sendChunk({ modality: "audio", payload, turn: turn ? turn.number : null })) {
      return this.#becomeNetwork("paused");
    }
    if (turn) return this.conversation.keepSound(turn, "user", samples);
    this.#sentMs += (samples.length / this.sound.rate) * 1000; // the server's places count what it listens to
    this.#remembered.push({ endMs: this.#sentMs, capturedAt, samples });
    if (this.#remembered.length > REMEMBERED_CHUNKS) this.#remembered.splice(0, REMEMBERED_CHUNKS / 10);
  }

  /* Sound that the network does not take piles up in the browser. Pieces cut out of speech would be heard as something
     else: it is better to stop, and to say so. */
  #watchNetwork() {
    const behind = this.session.bufferedBytes / (2 * this.sound.rate);
    if (behind > PAUSED_SECONDS) this.#becomeNetwork("paused");
    else if (behind > SLOW_SECONDS) this.#network === "paused" || this.#becomeNetwork("slow");
    else this.#becomeNetwork("well");
  }

  #becomeNetwork(state) {
    if (state === this.#network) return;
    this.#network = state;
    this.dispatchEvent(new CustomEvent("network", { detail: { state } }));
    if (state === "paused" && this.phase === "talking") this.#endTurn(0);
  }

  #fail(error) {
    if (this.phase === "talking") this.#endTurn(0);
    this.#pressedAt = null;
    this.microphone.close();
    this.#become("off");
    this.dispatchEvent(new CustomEvent("problem", { detail: { error } }));
  }

  #become(phase) {
    this.phase = phase;
    this.#tell("change");
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }
}
