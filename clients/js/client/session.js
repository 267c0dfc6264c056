/* One conversation with the server over the native WebSocket. A connection that breaks is made again: the session is
   resumed where the server still has it, and begun anew where not. Events, with their `detail`:

   state     { state, ... }  connecting | open | waiting (`seconds` to the next try; `notice`, what the server said) |
                             refused (a key is needed) | ended
   created   the frame       a new session, to be configured at once; `lost`: an earlier one was lost, `resent`: turns that
                             are asked again
   resumed   the frame       the session was resumed; what the server lacks is sent again
   frame     the frame       any other frame of the server, output once; audio as { type: "audio", samples, startMs, words }
   rtt       milliseconds    of a ping

`onwire(direction, frame)`, where it is set, is called with every frame, "sent" or "received"; `frame` of a binary one is
{ type, modality, end_of_input, bytes }. `starting` is true from when the server said that it is not ready yet until it is, or cannot be reached. */

/** @import { Frame, InputChunk, ServerError, SessionConfig, SessionEvents, SessionOptions, Telling } from "../client.js" */

import { bytesOfBase64, decodeOutput, MODALITIES, parseFrame, samplesOf } from "./frames.js";
import { Outgoing } from "./outgoing.js";

/* Audio with the times of its words is JSON; bare audio is smaller. */
const PROTOCOLS = { words: "omni.v1+json", bare: "omni.v1+binary" };
const KEY_ENTRY = "omni-api-key.";
const RETRY_MS = [250, 500, 1000, 2000, 4000];
const PING_MS = 4000;
/* Silence behind a ping after which the connection is taken for dead; browsers notice only after minutes. */
const DEAD_MS = 8000;
const REPLACED = 4409;
/* A close by the page that is no end of the session: it is coming back. */
const COMING_BACK = 4000;
const NORMAL = 1000;

/** What the server says of a new session, and of one that goes on.
 @typedef {Pick<SessionEvents["created"], "session_id" | "model" | "capabilities"> & { resume_token?: string }} Created
 @typedef {SessionEvents["resumed"] & { resume_token: string }} Resumed */

export class Session extends /** @type {Telling<SessionEvents>} */ (EventTarget) {
  /** @type {WebSocket | null} */
  #socket = null;
  #outgoing = new Outgoing();
  /* Of a session that can be resumed. */
  /** @type {{ id: string, token: string } | null} */
  #identity = null;
  #hadSession = false;
  #lastOutput = -1;
  #toldOutput = "";
  #ready = false; // the server has told which session this is
  #attempt = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #pinger;
  /* Runs from the first ping since something was heard. */
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #deadline;
  /** @type {SessionConfig} */
  #configuration = {};
  /** @type {Set<string>} */
  #refusedFields = new Set();
  /** @type {{ error?: ServerError, closing?: Frame } | null} */
  #lastNotice = null;
  /** @type {((direction: "sent" | "received", frame: Frame) => void) | null} */
  onwire = null;
  /** @type {"connecting" | "open" | "waiting" | "refused" | "ended"} */
  state = "ended";
  starting = false;

  /* `base` is the address of the server; `key` gives the key of the moment, or "". `words` asks for the times of spoken
     words. `WebSocket` is a class like the global one, for runtimes without it. */
  /** @param {string | URL} base @param {() => string} key @param {SessionOptions} [options] */
  constructor(base, key, { words = true, WebSocket = globalThis.WebSocket } = {}) {
    super();
    this.protocol = words ? PROTOCOLS.words : PROTOCOLS.bare;
    this.WebSocket = WebSocket;
    this.url = new URL("v1/streaming_input", base);
    this.url.protocol = this.url.protocol === "https:" ? "wss:" : "ws:";
    this.modelsUrl = new URL("v1/models", base);
    this.healthUrl = new URL("health", base);
    this.key = key;
  }

  get ready() {
    return this.#ready;
  }

  /* Bytes that the browser could not hand to the network yet. */
  get bufferedBytes() {
    return this.#socket?.bufferedAmount ?? 0;
  }

  get unacknowledged() {
    return this.#outgoing.unacknowledged;
  }

  open() {
    clearTimeout(this.#timer);
    this.#abandon();
    this.#tell("connecting", { again: this.#hadSession });
    const url = new URL(this.url);
    if (this.#identity) {
      url.searchParams.set("session_id", this.#identity.id);
      url.searchParams.set("resume_token", this.#identity.token);
      url.searchParams.set("last_output", String(this.#lastOutput));
    }
    const key = this.key();
    let socket;
    try {
      socket = new this.WebSocket(url, key ? [this.protocol, KEY_ENTRY + key] : [this.protocol]);
    } catch {
      this.#tell("refused", { reason: "unsendable" });
      return;
    }
    socket.binaryType = "arraybuffer";
    socket.onopen = () => (this.#attempt = 0);
    socket.onmessage = ({ data }) => this.#read(data);
    socket.onclose = ({ code }) => this.#closed(code);
    this.#socket = socket;
    this.#lastNotice = null;
  }

  /* End the session. `open` begins a new one. */
  close() {
    clearTimeout(this.#timer);
    this.#forget();
    this.#abandon(NORMAL);
    this.#tell("ended", { reason: "closed" });
  }

  /* End the session and begin a new one, to which nothing of this one is sent. */
  startAnew() {
    this.#forget();
    this.#abandon(NORMAL);
    this.open();
  }

  /* Connect now rather than when the next try is due. */
  hurry() {
    if (this.state === "waiting") this.open();
  }

  /* Ask whether the connection still lives; one that does not answer in time is made again. */
  check() {
    if (this.state === "open") this.#ping();
    else this.hurry();
  }

  /* The wanted configuration, whole; it is said again to every new session. */
  /** @param {SessionConfig} configuration */
  configure(configuration) {
    this.#configuration = configuration;
    this.#refusedFields.clear();
    if (this.#ready) this.#sendConfiguration();
  }

  /* Send a chunk, or keep it until there is a connection again. False where no more can be kept. */
  /** @param {InputChunk} chunk */
  sendChunk(chunk) {
    if (!this.#outgoing.hasRoom(chunk.payload.byteLength)) return false;
    const frame = this.#outgoing.add(chunk);
    this.#sendFrame(frame);
    return true;
  }

  /* Whether anything of a turn was sent, or is kept to be sent. */
  /** @param {number | null} turn */
  hasBegun(turn) {
    return this.#outgoing.hasBegun(turn);
  }

  /* The answer to a turn began or is not wanted any more: it need not be asked again. */
  /** @param {number | null} turn */
  answered(turn) {
    this.#outgoing.answered(turn);
  }

  /* Stop the answer of the moment, or that of one request. */
  /** @param {string} [requestId] */
  cancel(requestId) {
    this.#send({ type: "cancel", request_id: requestId });
  }

  /* Drop a request and all later ones from the history: `history_truncated` replies, or an error with the parameter
     request_id. False where there is no connection. */
  /** @param {string} requestId */
  truncate(requestId) {
    this.#send({ type: "history_truncate", request_id: requestId });
    return this.#ready;
  }

  /* All output so far was received; `playedMs` of the answer to this request were heard. */
  /** @param {number} [playedMs] @param {string | null} [requestId] */
  acknowledge(playedMs, requestId) {
    const told = `${this.#lastOutput} ${playedMs} ${requestId}`;
    if (!this.#ready || this.#lastOutput < 0 || told === this.#toldOutput) return;
    this.#toldOutput = told;
    const heard = playedMs === undefined ? {} : { played_ms: playedMs, ...(requestId ? { request_id: requestId } : {}) };
    this.#send({ type: "output_ack", sequence_id: this.#lastOutput, ...heard });
  }

  /** @param {Frame} frame */
  #send(frame) {
    if (!this.#ready) return;
    this.#socket?.send(JSON.stringify(frame));
    this.onwire?.("sent", frame);
  }

  /** @param {string | Uint8Array<ArrayBuffer>} frame */
  #sendFrame(frame) {
    if (!this.#ready) return;
    this.#socket?.send(frame);
    if (this.onwire) this.onwire("sent", typeof frame === "string" ? JSON.parse(frame) : described("input_chunk", frame));
  }

  #sendConfiguration() {
    const fields = Object.entries(this.#configuration).filter(([name]) => !this.#refusedFields.has(name));
    this.#send({ type: "session_config", ...Object.fromEntries(fields) });
  }

  /** @param {string | ArrayBuffer} data */
  #read(data) {
    this.#endDeadline();
    if (data instanceof ArrayBuffer) {
      const { sequenceId, modality, startMs, payload } = decodeOutput(data);
      if (this.onwire) this.onwire("received", described("output_chunk", data));
      if (modality === "audio" && this.#isNew(sequenceId)) {
        this.#emit("frame", { type: "audio", samples: samplesOf(payload), startMs });
      }
      return;
    }
    /** @type {any} */ // its fields are believed to be those of the protocol
    const frame = parseFrame(data);
    this.onwire?.("received", frame);
    switch (frame.type) {
      case "session_created":
        return this.#begin(frame);
      case "session_resumed":
        return this.#resume(frame);
      case "input_ack":
        return this.#outgoing.acknowledge(frame.next_sequence_id);
      case "pong":
        return typeof frame.t === "number" && this.#emit("rtt", performance.now() - frame.t);
      case "error":
        return this.#complain(frame);
      case "session_closing":
        this.#lastNotice = { closing: frame };
        return this.#emit("frame", frame);
      case "output_chunk":
        return this.#isNew(frame.sequence_id) && this.#emit("frame", frame.payload === undefined ? frame : audioOf(frame));
      default:
        return this.#emit("frame", frame);
    }
  }

  /* Output that a resumed connection repeats is not told again. */
  /** @param {number} sequenceId */
  #isNew(sequenceId) {
    if (sequenceId <= this.#lastOutput) return false;
    this.#lastOutput = sequenceId;
    return true;
  }

  /** @param {Created} frame */
  #begin(frame) {
    const lost = this.#hadSession;
    this.#identity = frame.resume_token ? { id: frame.session_id, token: frame.resume_token } : null;
    this.#hadSession = true;
    this.#lastOutput = -1;
    const { frames, turns } = this.#outgoing.restart();
    this.#nowReady();
    this.#emit("created", { ...frame, lost, resent: turns }); // who hears it configures the session
    for (const kept of frames) this.#sendFrame(kept);
  }

  /** @param {Resumed} frame */
  #resume(frame) {
    this.#identity = { id: frame.session_id, token: frame.resume_token };
    const frames = this.#outgoing.resume(frame.next_sequence_id);
    this.#nowReady({ measured: false }); // its pong comes behind all that is told again
    this.#sendConfiguration(); // it may have been lost on the way
    for (const kept of frames) this.#sendFrame(kept);
    this.#emit("resumed", frame);
  }

  #nowReady({ measured = true } = {}) {
    this.#ready = true;
    this.starting = false;
    clearInterval(this.#pinger);
    this.#pinger = setInterval(() => globalThis.document?.hidden || this.#ping(), PING_MS);
    this.#ping({ measured });
    this.#tell("open"); // who hears it may close the session
  }

  #ping({ measured = true } = {}) {
    this.#send({ type: "ping", t: measured ? performance.now() : null });
    this.#deadline ??= setTimeout(() => this.#closed(1006), DEAD_MS);
  }

  #endDeadline() {
    clearTimeout(this.#deadline);
    this.#deadline = undefined;
  }

  /** @param {Frame} frame */
  #complain(frame) {
    const { code, param } = frame.error;
    this.#lastNotice = { error: frame.error };
    const field = param?.split(/[.[]/)[0];
    if (field && field in this.#configuration && !this.#refusedFields.has(field) && !frame.error.request_id) {
      // A patch applies as a whole or not at all: the rest of it shall not suffer from one field.
      this.#refusedFields.add(field);
      this.#sendConfiguration();
    }
    if (code === "session_not_found" || code === "resync_required") {
      this.#identity = null; // a new session follows, here or on the next connection
      return;
    }
    if (this.#ready) this.#emit("frame", frame); // else it is why there is no session: the next state tells it
  }

  /** @param {number} code */
  async #closed(code) {
    const wasReady = this.#ready;
    const notice = this.#lastNotice;
    this.#abandon();
    if (code === REPLACED) {
      this.#identity = null;
      return this.#tell("ended", { reason: "replaced" });
    }
    if (notice?.closing?.reason === "session_timeout") {
      this.#identity = null;
      return this.#tell("ended", { reason: "session_timeout" });
    }
    const refused = !wasReady && !notice && (await this.#keyIsRefused());
    const starting = !wasReady && notice?.error?.code === "engine_overloaded" && (await this.#isStarting());
    if (this.#socket) return; // opened anew meanwhile
    this.starting = starting;
    if (refused) return this.#tell("refused", { reason: "key" });
    const wanted = RETRY_MS[Math.min(this.#attempt++, RETRY_MS.length - 1)] * (0.75 + Math.random() / 2);
    const delay = Math.max(wanted, notice?.error?.retry_after_ms ?? 0);
    this.#tell("waiting", { seconds: delay / 1000, notice, again: this.#hadSession });
    this.#timer = setTimeout(() => this.open(), delay);
  }

  /* A browser does not tell why a handshake was refused; an ordinary request with the same key does. */
  async #keyIsRefused() {
    const key = this.key();
    try {
      /** @type {HeadersInit} */
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      return (await fetch(this.modelsUrl, { headers, cache: "no-store" })).status === 401;
    } catch {
      return false;
    }
  }

  /* A server that loads its model and one that is full say the same; /health tells them apart. */
  async #isStarting() {
    try {
      return (await (await fetch(this.healthUrl, { cache: "no-store" })).json()).status === "starting";
    } catch {
      return false;
    }
  }

  #forget() {
    this.#identity = null;
    this.#hadSession = false;
    this.#outgoing = new Outgoing();
    this.#attempt = 0;
  }

  #abandon(code = COMING_BACK) {
    const socket = this.#socket;
    this.#socket = null;
    this.#ready = false;
    clearInterval(this.#pinger);
    this.#endDeadline();
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close(code);
  }

  /** @param {Session["state"]} state @param {Omit<SessionEvents["state"], "state">} [more] */
  #tell(state, more = {}) {
    this.state = state;
    this.#emit("state", { state, ...more });
  }

  /** @template {keyof SessionEvents} Name @param {Name} name @param {SessionEvents[Name]} detail */
  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/* Audio as the binary form has it, with the words that the JSON form adds. */
/** @param {Frame} frame */
function audioOf({ request_id: requestId, payload, start_ms: startMs, words = [] }) {
  return { type: "audio", request_id: requestId, samples: samplesOf(bytesOfBase64(payload)), startMs, words };
}

/** @param {string} type @param {Uint8Array | ArrayBuffer} frame */
function described(type, frame) {
  const header = frame instanceof ArrayBuffer ? new Uint8Array(frame) : frame;
  return { type, modality: MODALITIES[header[2]], end_of_input: (header[3] & 1) === 1, bytes: header.byteLength };
}
