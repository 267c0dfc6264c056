/* Plays the answers, and knows to the sample what was heard of them. Events:

   started  { id, heardAt }          the first sound of an answer, on the clock of performance.now()
   ended    { id, playedMs }         its last
   flushed  { id, playedMs }         an answer was cut short: so much of it was heard
   level    { peak, queuedMs, underruns, targetMs }   every 20 ms or so while something sounds
   overflow { id }                   more came than can be held: the answer ends early */

/** @import { Sound, SpeakerEvents, Telling } from "../client.js" */

/** What the audio thread tells (playback-worklet.js).
 @typedef {{ type: string, id: number, played: number, time: number, queued: number }} Report */

export class Speaker extends /** @type {Telling<SpeakerEvents>} */ (EventTarget) {
  /** @type {AudioWorkletNode | null} */
  #node = null;
  #rate = 0;
  #sound;
  /** @type {[object, Transferable[]][]} */
  #early = [];
  /** @type {number | null} */
  #id = null;
  #played = 0;

  /** @param {Sound} sound */
  constructor(sound) {
    super();
    this.#sound = sound;
    sound.addEventListener("change", () => sound.context || this.#leave());
  }

  /* Once the context is there; what came before is played now. */
  /** @param {AudioContext} context */
  attach(context) {
    if (this.#node) return;
    this.#rate = context.sampleRate;
    const node = new AudioWorkletNode(context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
    this.#node = node;
    node.port.onmessage = ({ data }) => this.#heard(data);
    node.connect(context.destination);
    for (const [message, transfer] of this.#early) node.port.postMessage(message, transfer);
    this.#early = [];
  }

  /* The context is closed, and reports no more. */
  #leave() {
    if (this.#node) this.#node.port.onmessage = null;
    this.#node = null;
    if (this.#id !== null) this.#heard({ type: "flushed", id: this.#id, played: this.#played, time: 0, queued: 0 });
  }

  get playing() {
    return this.#id !== null;
  }

  /* The answer that plays; undefined where none does. */
  get playingId() {
    return this.#id ?? undefined;
  }

  /* Milliseconds of the current answer that reached the ear; undefined where none plays. */
  get playedMs() {
    return this.#id === null ? undefined : this.#heardMs(this.#played);
  }

  /* `samples` (Int16Array) are given away; they begin `place` samples into the answer. */
  /** @param {number} id @param {Int16Array} samples @param {number} place */
  play(id, samples, place) {
    this.#post({ type: "push", id, samples, place }, [samples.buffer]);
  }

  /** @param {number} id */
  end(id) {
    this.#post({ type: "end", id });
  }

  /* Lower the sound by 15 dB, which plays on, or let it be as loud as before. */
  /** @param {boolean} lowered */
  duck(lowered) {
    this.#post({ type: "duck", lowered });
  }

  flush() {
    this.#early = [];
    this.#post({ type: "flush" });
  }

  /** @param {{ type: string, [name: string]: unknown }} message @param {Transferable[]} transfer */
  #post(message, transfer = []) {
    if (this.#node) this.#node.port.postMessage(message, transfer);
    else if (message.type !== "flush") this.#early.push([message, transfer]);
  }

  /** @param {Report} data */
  #heard(data) {
    /** @param {object} detail */
    const emit = (detail) => this.dispatchEvent(new CustomEvent(data.type, { detail }));
    const { id, played } = data;
    switch (data.type) {
      case "started":
        this.#id = id;
        this.#played = played;
        return emit({ id, heardAt: this.#sound.heardAt(data.time) });
      case "ended":
        this.#id = null;
        return emit({ id, playedMs: (played / this.#rate) * 1000 });
      case "flushed":
        this.#id = null;
        return emit({ id, playedMs: this.#heardMs(played) });
      case "level":
        if (id !== undefined && id === this.#id) this.#played = played;
        return emit({ ...data, queuedMs: (data.queued / this.#rate) * 1000 });
      default:
        return emit({ id });
    }
  }

  /** @param {number} samples */
  #heardMs(samples) {
    return (Math.max(0, samples - this.#sound.latencySamples) / this.#rate) * 1000;
  }
}
