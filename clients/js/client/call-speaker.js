/* What the server plays in a call, on its way to the ear: whose answer it is, how much of it was heard, and its sound. Has
   the methods and events of a Speaker. */

/** @import { SpeakerEvents, Telling, VoiceClient } from "../client.js" */
/** @import { KeptTurn } from "./conversation.js" */

import { join } from "./conversation.js";

/* A piece of the capture worklet. */
const PIECE_MS = 20;
/* What is louder is no silence. */
const AUDIBLE = 0.003;
/* What is still on its way when the server has played the last. */
const TAIL_MS = 200;

export class CallSpeaker extends /** @type {Telling<SpeakerEvents>} */ (EventTarget) {
  #client;
  #told;
  /* Browsers let the sound of a call flow only where an element plays it. */
  /** @type {HTMLAudioElement | null} */
  #element = null;
  /** @type {MediaStream | null} */
  #stream = null;
  /** @type {GainNode | null} */
  #gain = null;
  /** @type {MediaStreamAudioSourceNode | null} */
  #source = null;
  /* By the ids of responses, the requests that they answer: those of the call. */
  /** @type {Map<string, string>} */
  #requests = new Map();
  /** @type {KeptTurn | null} */
  #turn = null;
  #sounds = false;
  #rest = Infinity;
  /** @type {Int16Array[]} */
  #pieces = [];
  #played = 0;

  /** @param {VoiceClient} client @param {EventTarget} told what tells of the sound by its event `audio` */
  constructor(client, told) {
    super();
    this.#client = client;
    this.#told = told;
  }

  get playing() {
    return this.#sounds;
  }

  get playingId() {
    return this.#turn?.number;
  }

  get playedMs() {
    return this.#sounds ? this.#heardMs(this.#client.sound.latencySamples) : undefined;
  }

  /** @param {AudioContext} context */
  attach(context) {
    if (this.#gain?.context === context) return;
    const capture = new AudioWorkletNode(context, "capture", { numberOfInputs: 1, numberOfOutputs: 0 });
    capture.port.onmessage = ({ data }) => this.#chunk(data);
    this.#gain = new GainNode(context);
    this.#gain.connect(context.destination);
    this.#gain.connect(capture);
    this.#join(context);
  }

  /* The track of a call. */
  /** @param {MediaStream} stream */
  connect(stream) {
    this.#stream = stream;
    this.#requests.clear();
    this.#element ??= Object.assign(new Audio(), { muted: true });
    this.#element.srcObject = stream;
    this.#element.play().catch(() => {}); // it is replaced, or waits for a gesture
    this.#join(this.#client.sound.context);
  }

  /** @param {AudioContext | null} context */
  #join(context) {
    if (!context || !this.#stream || this.#gain?.context !== context) return;
    this.#source?.disconnect();
    this.#source = new MediaStreamAudioSourceNode(context, { mediaStream: this.#stream });
    this.#source.connect(this.#gain);
  }

  /* The audio of a response belongs to this request. */
  /** @param {string} responseId @param {string} requestId */
  expect(responseId, requestId) {
    this.#requests.set(responseId, requestId);
  }

  /* The server begins to play a response. */
  /** @param {string} responseId */
  begin(responseId) {
    const requestId = this.#requests.get(responseId);
    const turns = /** @type {KeptTurn[]} */ (this.#client.conversation.turns);
    const turn = turns.find((one) => one.requestId === requestId);
    this.#finish("ended");
    if (!turn || turn.unwanted || !this.#gain) return;
    this.#turn = turn;
    this.#rest = Infinity;
    this.#gain.gain.value = 1;
  }

  play() {}

  /* The server itself lowers what it plays. */
  duck() {}

  /* The server has played all of it; with an argument, all of an answer's text has come. */
  /** @param {number} [turn] */
  end(turn) {
    if (turn === undefined) this.#rest = TAIL_MS;
  }

  flush() {
    if (this.#gain) this.#gain.gain.value = 0;
    this.#finish("flushed");
  }

  /** @param {{ samples: Int16Array, peak: number }} chunk */
  #chunk({ samples, peak }) {
    const turn = this.#turn;
    if (!turn) return;
    const { sound } = this.#client;
    if (!this.#sounds && peak > AUDIBLE) {
      this.#sounds = true;
      const heardAt = sound.heardAt(sound.context?.currentTime ?? 0) - PIECE_MS;
      this.#emit("started", { id: turn.number, heardAt });
    }
    if (this.#sounds) {
      this.#played += samples.length;
      this.#pieces.push(samples);
      this.#told.dispatchEvent(new CustomEvent("audio", { detail: { turn, samples } }));
      this.#emit("level", { id: turn.number, peak, queuedMs: 0, underruns: 0, targetMs: 0 });
    }
    this.#rest -= (samples.length / (sound.rate ?? Infinity)) * 1000;
    if (this.#rest <= 0) this.#finish("ended");
  }

  /** @param {"ended" | "flushed"} how */
  #finish(how) {
    const [turn, sounded, pieces] = [this.#turn, this.#sounds, this.#pieces];
    const playedMs = how === "ended" ? this.#heardMs(0) : this.playedMs;
    this.#turn = null;
    this.#sounds = false;
    this.#played = 0;
    this.#pieces = [];
    if (!turn || !sounded) return;
    join(pieces); // the turn itself joins only what came before its answer was complete
    this.#client.conversation.keepSound(turn, "server", pieces[0]);
    this.#emit(how, { id: turn.number, playedMs: playedMs ?? 0 });
  }

  /** @param {number} latency */
  #heardMs(latency) {
    const { rate } = this.#client.sound;
    return rate === null ? 0 : (Math.max(0, this.#played - latency) / rate) * 1000;
  }

  /** @template {keyof SpeakerEvents} Name @param {Name} name @param {SpeakerEvents[Name] & { id: number }} detail */
  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
