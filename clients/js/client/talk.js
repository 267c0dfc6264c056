/* What the microphone hears, on its way to the server. Two ways: a button that is held (or tapped, to begin and to end),
   and an open microphone, where the server notices by itself who speaks. Events:

   change                        something that the page shows is different: `phase`, `muted`
   turn    { turn }              a turn of the button began
   level   { peak }              every 20 ms, in a long silence every 100
   silent                        the microphone has given no sound for some seconds since it was opened
   problem { error }             the microphone cannot be had
   network { state }             "slow": what is said arrives late; "paused": it is not sent; "well" */

/** @import { Conversation, Microphone, MicrophoneChoice, MicrophoneEvents } from "../client.js" */
/** @import { Session, Sound, TalkEvents, Telling, Turn } from "../client.js" */

import { bytesOf } from "./frames.js";

/* A shorter press is a tap, which begins a turn that the next tap ends. */
const TAP_MS = 280;
/* What is in the pipeline when the button is let go belongs to the turn. */
const TAIL_MS = 55;
const LATE_TAIL_MS = 1000;
const SLOW_SECONDS = 1.5;
const PAUSED_SECONDS = 15;
/* A microphone that gives nothing so long, or zeros, is switched off, or has been given to another program. */
const SILENT_MS = 3000;
/* Of what was sent, so much is remembered to find what the server means by a place in the audio. */
const REMEMBERED_CHUNKS = 3000;

export class Talk extends /** @type {Telling<TalkEvents>} */ (EventTarget) {
  /** @type {"open" | "hold"} */
  mode = "hold";
  /* `talking` is a turn of the button, `listening` an open microphone. */
  /** @type {"off" | "opening" | "talking" | "listening"} */
  phase = "off";
  muted = false;
  /** @type {MicrophoneChoice} */
  devices = {};
  /** @type {Turn | null} */
  #turn = null;
  #tail = 0; // milliseconds that are still to come
  /** @type {number | null} */
  #pressedAt = null;
  #starts = 0;
  /** @type {TalkEvents["network"]["state"]} */
  #network = "well";
  #full = false; // the session kept no more when it was given the last piece
  /* Whether samples with a level have come out of the microphone since it was opened: devices give zeros, or nothing, before
     they have woken up, and what is said meanwhile is lost. */
  #awake = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #silence;
  /** @type {{ endMs: number, capturedAt: number, samples: Int16Array }[]} */
  #remembered = [];
  #sentMs = 0;

  /** @param {{ sound: Sound, microphone: Microphone, session: Session, conversation: Conversation }} parts */
  constructor({ sound, microphone, session, conversation }) {
    super();
    this.sound = sound;
    this.microphone = microphone;
    this.session = session;
    this.conversation = conversation;
    microphone.addEventListener("chunk", ({ detail }) => this.#chunk(detail));
    microphone.addEventListener("lost", () => this.#fail(new DOMException("the microphone went away", "LostError")));
  }

  /* Whether somebody wants to be heard and is not yet: the microphone is being opened, or has given no sound so far. */
  get opening() {
    return this.phase === "opening" || (this.phase !== "off" && !this.#awake && !this.muted);
  }

  /* The button goes down, `at` the event's own time: opening a microphone can keep the page from the next event for a
     while, and a tap is one all the same. Resolves to the Error for which there is no microphone, if there is one. */
  /** @param {number} at @returns {Promise<Error | undefined>} */
  async press(at) {
    if (this.phase === "off") {
      if (this.mode !== "open") this.#pressedAt = at;
      return this.#start(this.mode === "open" ? "listening" : "talking");
    }
    if (this.mode === "open") this.stop();
    else this.#endTurn(); // the second tap
  }

  /* The button goes up. */
  /** @param {number} at */
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
    this.#starts += 1; // what is being opened is not wanted any more, nor told of
    if (this.phase === "talking") this.#endTurn(0);
    this.#pressedAt = null;
    this.muted = false; // who begins anew wants to be heard
    this.microphone.close();
    this.#become("off");
  }

  /* No session takes any more of this turn. */
  /** @param {number} turn */
  leave(turn) {
    if (this.#turn?.number !== turn) return;
    this.#turn = null;
    this.#tail = 0;
    this.#pressedAt = null;
    this.#become("off");
  }

  /** @param {boolean} muted */
  mute(muted) {
    this.muted = muted;
    this.microphone.muted = muted;
    this.#watchSilence();
    this.#tell("change");
  }

  /* Open the microphone again, with the devices of now. */
  async reopen() {
    const { context } = this.sound;
    if (!this.microphone.isOpen || !context) return;
    try {
      await this.#open(context);
      this.microphone.muted = this.muted;
      this.#watchSilence();
      this.#tell("change");
    } catch (error) {
      this.#fail(/** @type {Error} */ (error));
    }
  }

  /* A new session counts its audio from nothing. */
  forgetPlaces() {
    this.#sentMs = 0;
    this.#remembered = [];
  }

  /* When the audio up to `audioMs` was spoken, on the clock of performance.now(); null where nobody remembers. */
  /** @param {number} audioMs */
  spokenAt(audioMs) {
    const found = this.#remembered.find(({ endMs }) => endMs >= audioMs);
    return found ? found.capturedAt - (found.endMs - audioMs) : null;
  }

  /* The samples that were sent between two places in the audio. */
  /** @param {number} startMs @param {number} endMs */
  samplesBetween(startMs, endMs) {
    return this.#remembered.filter((one) => one.endMs > startMs && one.endMs <= endMs).map(({ samples }) => samples);
  }

  /** @param {AudioContext} context */
  async #open(context) {
    this.#awake = false;
    await this.microphone.open(context, this.devices);
  }

  /** @param {"talking" | "listening"} phase @returns {Promise<Error | undefined>} */
  async #start(phase) {
    const start = ++this.#starts;
    this.#become("opening");
    try {
      const context = await this.sound.wake();
      if (start !== this.#starts) return;
      if (!this.microphone.isOpen) await this.#open(context);
      await this.sound.running();
    } catch (error) {
      if (start !== this.#starts) return;
      this.#fail(/** @type {Error} */ (error));
      return /** @type {Error} */ (error);
    }
    if (start !== this.#starts) return; // let go, and pressed again, while the browser asked
    if (this.phase !== "opening") {
      if (this.mode === "open") this.microphone.close();
      return;
    }
    this.microphone.muted = phase === "listening" && this.muted;
    if (phase === "talking") {
      this.#turn = this.conversation.begin("spoken");
      this.#tell("turn", { turn: this.#turn });
    }
    this.#become(phase);
  }

  #endTurn(tail = TAIL_MS) {
    if (this.phase === "opening") return this.#become("off");
    const turn = this.#turn;
    if (this.phase !== "talking" || !turn) return;
    if (this.#tail === 0) this.conversation.endSpeech(turn, performance.now());
    else if (tail > 0) return; // it is ending
    if (tail === 0) return this.#finishTurn(new Uint8Array(0));
    this.#tail = tail;
    // A browser that was interrupted by a call gives no more sound; the turn ends all the same.
    setTimeout(() => this.#turn === turn && this.#finishTurn(new Uint8Array(0)), LATE_TAIL_MS);
  }

  /** @param {Uint8Array} payload */
  #finishTurn(payload) {
    const turn = this.#turn;
    if (!turn) return;
    this.#turn = null;
    this.#tail = 0;
    if (payload.length === 0 && !this.session.hasBegun(turn.number)) this.conversation.fail(turn, "empty_input");
    else this.#sendEnd(payload, turn);
    this.#become("off");
  }

  /* The end says nothing, and so it has room where the last of the sound has none. */
  /** @param {Uint8Array} payload @param {Turn} turn */
  #sendEnd(payload, turn) {
    const end = { modality: /** @type {const} */ ("audio"), endOfInput: true, turn: turn.number, ref: turn.ref };
    if (this.session.sendChunk({ ...end, payload }) || this.session.sendChunk({ ...end, payload: new Uint8Array(0) })) return;
    this.conversation.fail(turn, "undeliverable");
  }

  /** @param {MicrophoneEvents["chunk"]} chunk */
  #chunk({ samples, peak, capturedAt }) {
    if (!this.#awake && peak > 0) {
      this.#awake = true;
      this.#watchSilence();
      this.#tell("change");
    }
    const sending = this.phase === "talking" || this.phase === "listening";
    this.#tell("level", { peak: this.muted || !sending ? 0 : peak });
    const { rate } = this.sound;
    if (!sending || rate === null) return;
    this.#watchNetwork(rate);
    const payload = bytesOf(samples);
    const turn = this.#turn;
    const ms = (samples.length / rate) * 1000;
    if (turn && this.#tail > 0 && (this.#tail -= ms) <= 0) {
      this.conversation.keepSound(turn, "user", samples);
      return this.#finishTurn(payload);
    }
    if (this.#network === "paused" && !this.#full) return;
    this.#full = !this.session.sendChunk({ modality: "audio", payload, turn: turn ? turn.number : null, ref: turn?.ref });
    if (this.#full) return this.#becomeNetwork("paused");
    if (turn) return this.conversation.keepSound(turn, "user", samples);
    this.#sentMs += ms; // the server's places count what it listens to
    this.#remembered.push({ endMs: this.#sentMs, capturedAt, samples });
    if (this.#remembered.length > REMEMBERED_CHUNKS) this.#remembered.splice(0, REMEMBERED_CHUNKS / 10);
  }

  /* Sound that the network does not take piles up in the browser. Pieces cut out of speech would be heard as something
     else: it is better to stop, and to say so. */
  /** @param {number} rate */
  #watchNetwork(rate) {
    const behind = this.session.bufferedBytes / (2 * rate);
    if (behind > PAUSED_SECONDS) this.#becomeNetwork("paused");
    else if (behind > SLOW_SECONDS) this.#network === "paused" || this.#becomeNetwork("slow");
    else if (!this.#full) this.#becomeNetwork("well");
  }

  /** @param {TalkEvents["network"]["state"]} state */
  #becomeNetwork(state) {
    if (state === this.#network) return;
    this.#network = state;
    this.#tell("network", { state });
    if (state === "paused" && this.phase === "talking") this.#endTurn(0);
  }

  /** @param {Error} error */
  #fail(error) {
    if (this.phase === "talking") this.#endTurn(0);
    this.#pressedAt = null;
    this.muted = false; // as where it is stopped
    this.microphone.close();
    this.#become("off");
    this.#tell("problem", { error });
  }

  #watchSilence() {
    clearTimeout(this.#silence);
    if (this.phase === "opening" || !this.opening) return; // a browser may ask the person for long
    this.#silence = setTimeout(() => this.#tell("silent"), SILENT_MS);
  }

  /** @param {Talk["phase"]} phase */
  #become(phase) {
    this.phase = phase;
    this.#watchSilence();
    this.#tell("change");
  }

  /** @param {keyof TalkEvents} name @param {object} [detail] */
  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
