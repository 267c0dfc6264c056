/* The page's one AudioContext. The browser lets it run only after a gesture, and may put it to sleep at any time. */

/** @import { SoundEvents, Telling } from "../client.js" */

import { SOURCES } from "./worklet-sources.js";

/* What the protocol takes as a sample rate. */
const LOWEST_RATE = 8000;
const HIGHEST_RATE = 192000;
const USUAL_RATE = 48000;
/* A context that does not run by then is not going to. */
const START_MS = 10_000;
/* Where the sound goes through PulseAudio or PipeWire, asking a context of Firefox for its latency can lock the page and
   the audio thread against each other for good. There the usual one is taken. */
const MAY_ASK_LATENCY = !/X11.*Firefox\//.test(globalThis.navigator?.userAgent ?? "");
const USUAL_LATENCY_SECONDS = 0.04;

/* Bundlers look for exactly this form, with the name written out: some copy the file and put its new address here, others leave
   an address at which there is nothing. */
const WORKLETS = [
  { file: "capture-worklet.js", address: () => new URL("./capture-worklet.js", import.meta.url).href },
  { file: "playback-worklet.js", address: () => new URL("./playback-worklet.js", import.meta.url).href },
];

/** Browsers that can play elsewhere have more than the standard library knows.
 @typedef {AudioContext & { sinkId?: string, setSinkId?: (id: string) => Promise<void> }} OutputContext */

export class Sound extends /** @type {Telling<SoundEvents>} */ (EventTarget) {
  /** @type {OutputContext | null} */
  #context = null;
  /** @type {Promise<unknown> | null} */
  #loading = null;
  #missing = WORKLETS;
  #failures = 0;
  #server;

  /* `server` is the address of one that gives its own page these files: the last place where they are looked for. */
  /** @param {string | URL} [server] */
  constructor(server) {
    super();
    this.#server = server;
  }

  /* The context's rate; null before the first gesture. */
  get rate() {
    return this.#context?.sampleRate ?? null;
  }

  get context() {
    return this.#context;
  }

  get locked() {
    return this.#context !== null && this.#context.state !== "running";
  }

  get canChooseOutput() {
    return typeof AudioContext !== "undefined" && "setSinkId" in AudioContext.prototype;
  }

  /* Call it from a gesture. Resolves to the context once the worklets are there; it may still be locked. Raises an Error
     named SoundUnavailable where they cannot be had; the next call asks for them again. */
  async wake() {
    if (!this.#context) {
      let context = new AudioContext();
      if (context.sampleRate < LOWEST_RATE || context.sampleRate > HIGHEST_RATE) {
        context.close();
        context = new AudioContext({ sampleRate: USUAL_RATE });
      }
      this.#context = context;
      // Whoever is told may use the worklets.
      context.onstatechange = () => this.#load().then(() => this.#tell(), () => {});
      // Browsers with only one kind of session at a time would silence the speaker while the microphone is open.
      if ("audioSession" in navigator) Object.assign(/** @type {object} */ (navigator.audioSession), { type: "play-and-record" });
    }
    this.revive();
    await this.#load();
    this.#tell();
    return this.#awake;
  }

  /* Give the device back. `wake` takes another. */
  close() {
    const context = this.#context;
    if (!context) return;
    context.onstatechange = null;
    context.close().catch(() => {});
    this.#context = this.#loading = null;
    this.#missing = WORKLETS;
    this.#tell();
  }

  async #load() {
    this.#loading ??= Promise.allSettled(this.#missing.map((worklet) => this.#add(worklet)));
    const loading = this.#loading;
    await loading;
    if (this.#missing.length === 0) return;
    if (this.#loading === loading) this.#loading = null;
    throw new DOMException("what the page needs for sound cannot be loaded", "SoundUnavailable");
  }

  /* From beside this module; where a bundler has lost it, from the package's own text; where the page's policy forbids that,
     from the server. */
  /** @param {WORKLETS[number]} worklet */
  async #add(worklet) {
    const context = this.#awake;
    const own = URL.createObjectURL(new Blob([SOURCES[worklet.file]], { type: "text/javascript" }));
    const places = [worklet.address, () => own, () => new URL(`client/${worklet.file}`, this.#server).href];
    try {
      for (const place of places) {
        try {
          await within(context.audioWorklet.addModule(this.#retried(place())), START_MS);
          if (context === this.#context) this.#missing = this.#missing.filter((one) => one !== worklet);
          return;
        } catch {
          // the next place
        }
      }
    } finally {
      URL.revokeObjectURL(own);
    }
    this.#failures += 1;
    throw new Error(worklet.file);
  }

  /* A worklet remembers that an address failed. */
  /** @param {string} address */
  #retried(address) {
    return this.#failures && address.startsWith("http") ? `${address}?again=${this.#failures}` : address;
  }

  /* Resolves when sound flows, as it may once there is a microphone. Raises an Error named SoundLocked where it does not:
     the browser wants to be touched, or there is no output device, without which some do not record either. */
  async running() {
    const resumed = this.#awake.resume().catch(() => {});
    await Promise.race([resumed, new Promise((late) => setTimeout(late, START_MS))]);
    if (this.locked) throw new DOMException("the browser starts no sound", "SoundLocked");
  }

  /* After the page was away, or an output was unplugged. */
  revive() {
    if (this.locked) this.#awake.resume().catch(() => {});
  }

  /* `deviceId` "" is the system's own choice. */
  /** @param {string} deviceId */
  async chooseOutput(deviceId) {
    const context = this.#context;
    if (context?.setSinkId && (context.sinkId ?? "") !== deviceId) await context.setSinkId(deviceId);
  }

  /* When something at a context's time is heard, on the clock of performance.now(). */
  /** @param {number} time */
  heardAt(time) {
    return performance.now() + (time - this.#awake.currentTime + this.#latency) * 1000;
  }

  /* Samples that were given out and are on their way to the ear. */
  get latencySamples() {
    return Math.round(this.#latency * (this.rate ?? 0));
  }

  get #latency() {
    return MAY_ASK_LATENCY ? this.#context?.outputLatency || this.#context?.baseLatency || 0 : USUAL_LATENCY_SECONDS;
  }

  /* The context, once `wake` has made it. */
  get #awake() {
    if (!this.#context) throw new Error("there is no sound before wake()");
    return this.#context;
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}

/* What a promise brings, if it does so in time. */
/** @param {Promise<unknown>} promise @param {number} milliseconds */
function within(promise, milliseconds) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const late = new Promise((_resolve, reject) => (timer = setTimeout(() => reject(new Error("too late")), milliseconds)));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
