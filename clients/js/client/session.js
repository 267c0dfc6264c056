/* One conversation with the server over the native WebSocket. A connection that breaks is made again: the session is
   resumed where the server still has it, and begun anew where not. Events, with their `detail`:

   state     { state, ... }  connecting | open | waiting (`seconds` to the next try; `notice`, what the server said) |
                             refused (a key is needed) | ended. The delays grow until the server takes something in. They
                             are short while another replica may have the session; one that says so is left at once.
   created   the frame       a new session, to be configured at once; `lost`: an earlier one was lost, `resent`: turns that
                             are asked again
   undelivered { turn, code } nothing more is sent of a turn, for this code of the protocol or "undeliverable"
   resumed   the frame       the session was resumed; what the server lacks is sent again
   frame     the frame       any other frame of the server, output once; audio as { type: "audio", samples, startMs, words };
                             with the number of its chunk, `turn` is whose chunk that is; an error that refuses one says
                             `isOver` where no answer comes to the turn, and `isOpen` where its input has no end
   rtt       milliseconds    of a ping

`onwire(direction, frame)`, where it is set, is called with every frame, "sent" or "received"; `frame` of a binary one is
{ type, modality, end_of_input, bytes }. `starting` is true from when the server said that it is not ready yet until it is, or cannot be reached. */

/** @import { Frame, InputChunk, ServerError, SessionConfig, SessionEvents, SessionOptions, Telling } from "../client.js" */

import { bytesOfBase64, decodeOutput, MODALITIES, parseFrame, samplesOf } from "./frames.js";
import { Outgoing } from "./outgoing.js";
import { cut, PIECE_BYTES, Uplink } from "./uplink.js";

/* Audio with the times of its words is JSON; bare audio is smaller. */
const PROTOCOLS = { words: "omni.v1+json", bare: "omni.v1+binary" };
const KEY_ENTRY = "omni-api-key.";
/* The first delay, of a session that can be resumed and of any other; the longest, for about as long as a server keeps a
   session, and from then on. */
const RESUME_MS = 50;
const RETRY_MS = 250;
const MOST_MS = 1000;
const PATIENT_MS = 4000;
const PATIENT_FROM = 35;
/* While a session may be at another replica, so many tries are no reason to ask whether the key is refused. */
const QUIET_TRIES = 5;
const PING_MS = 4000;
/* Silence behind a ping after which the connection is taken for dead; browsers notice only after minutes. Behind what is
   being sent up the ping waits: so much a millisecond passes on the slowest network. */
const DEAD_MS = 8000;
const SLOWEST_BYTES_PER_MS = 16;
/* From the first packet to a server's first word. */
const OPENING_MS = 15_000;
/* Connections that end at the same turn without having brought anything further. */
const MAX_TRIES = 3;
const REPLACED = 4409;
const TOO_LARGE = 1009;
/* No error explains these closes: the network or the server went away. */
const UNEXPLAINED = [1000, 1001, 1005, 1006];
/* Such an error comes again whenever the same is sent again, and so does such a close without an error: a violation of
   the WebSocket protocol, text that is not UTF-8. */
const OF_THE_INPUT = ["payload_too_large", "reorder_window_exceeded", "invalid_frame"];
const OF_THE_FRAME = [1002, 1003, 1007, TOO_LARGE];
/* The server has no time or no room: what was sent is not to blame. */
const OF_THE_MOMENT = ["engine_overloaded", "rate_limited", "shutting_down"];
/* A close by the page that is no end of the session: it is coming back. */
const COMING_BACK = 4000;
const NORMAL = 1000;
const ORIGIN_NOT_ALLOWED = "origin_not_allowed";

/** What the server says of a new session, and of one that goes on.
 @typedef {Pick<SessionEvents["created"], "session_id" | "model" | "capabilities"> & { resume_token?: string,
   limits?: { max_chunk_bytes: number } }} Created
 @typedef {SessionEvents["resumed"] & { resume_token: string }} Resumed */

export class Session extends /** @type {Telling<SessionEvents>} */ (EventTarget) {
  /** @type {WebSocket | null} */
  #socket = null;
  #outgoing = new Outgoing();
  #uplink = new Uplink((frame) => this.#sendNow(frame));
  /* Of a session that can be resumed. */
  /** @type {{ session_id: string, resume_token: string } | null} */
  #identity = null;
  #hadSession = false;
  #lastOutput = -1;
  #resumable = true; // as far as the server's store works: what it has of the session is not older than what is known here
  #toldOutput = "";
  #ready = false; // the server has told which session this is
  #attempt = 0; // how many connections have been tried since the server took something in
  /* The turn at which connections end, and how many have. */
  /** @type {{ turn: number | null, tries: number }} */
  #stuck = { turn: null, tries: 0 };
  #maxChunkBytes = Infinity; // before the server has said
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #pinger;
  /* Runs until the first word of the server, and then from the first ping since something was heard. */
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
  /* Whether results of tools need no end: the server has it once all calls have theirs. */
  endsResults = true;

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

  /* Bytes that could not be handed to the network yet. */
  get bufferedBytes() {
    return (this.#socket?.bufferedAmount ?? 0) + this.#uplink.waitingBytes;
  }

  /* A chunk that cannot be cut, which is a picture or the result of a tool, may be so large; Infinity before the first session. */
  get maxChunkBytes() {
    return this.#maxChunkBytes;
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
      const known = { ...this.#identity, last_output: `${this.#lastOutput}`, resumable: `${this.#resumable}` };
      url.search = `${new URLSearchParams(known)}`;
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
    socket.onopen = () => this.#giveTime(DEAD_MS, { anew: true }); // the network is there: now the server has to say something
    socket.onmessage = ({ data }) => this.#read(data);
    socket.onclose = ({ code }) => this.#closed(code);
    this.#socket = socket;
    this.#lastNotice = null;
    // Behind a front, the next attempt may find a server that answers.
    this.#giveTime(Math.min(OPENING_MS, this.#identity ? 2000 * 2 ** this.#attempt : OPENING_MS));
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

  /* Send a chunk, in pieces where it is large, or keep it until there is a connection again. False, and nothing is sent, where no
     more can be kept, where it is too large and cannot be cut, and where a part of its turn is lost. */
  /** @param {InputChunk} chunk */
  sendChunk(chunk) {
    const outgoing = this.#outgoing;
    if (!outgoing.hasRoom(chunk.payload.byteLength) || outgoing.isGone(chunk.turn ?? null)) return false;
    const pieces = cut(chunk, Math.min(PIECE_BYTES, this.#maxChunkBytes));
    if (pieces[0].payload.byteLength > this.#maxChunkBytes) return false;
    for (const piece of pieces) this.#sendUp(outgoing.add(piece));
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
    this.#sendInOrder({ type: "cancel", request_id: requestId });
  }

  /* Drop a request and all later ones from the history: `history_truncated` replies, or an error with the parameter
     request_id. False where there is no connection. */
  /** @param {string} requestId */
  truncate(requestId) {
    this.#sendInOrder({ type: "history_truncate", request_id: requestId });
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

  /* Whether frames reach the server: a browser complains of one that is sent while the connection closes. */
  get #sends() {
    return this.#ready && (this.#socket?.readyState ?? 0) < 2;
  }

  /** @param {Frame} frame */
  #send(frame) {
    if (!this.#sends) return;
    this.#socket?.send(JSON.stringify(frame));
    this.onwire?.("sent", frame);
  }

  /* A frame that has its place between chunks. */
  /** @param {Frame} frame */
  #sendInOrder(frame) {
    if (this.#ready) this.#uplink.control(JSON.stringify(frame));
  }

  /** @param {string | Uint8Array<ArrayBuffer>} frame */
  #sendUp(frame) {
    if (this.#ready) this.#uplink.chunk(frame);
  }

  /** @param {string | Uint8Array<ArrayBuffer>} frame */
  #sendNow(frame) {
    if (!this.#sends) return;
    this.#socket?.send(frame);
    if (this.onwire) this.onwire("sent", typeof frame === "string" ? JSON.parse(frame) : described("input_chunk", frame));
  }

  #sendConfiguration() {
    const fields = Object.entries(this.#configuration).filter(([name]) => !this.#refusedFields.has(name));
    this.#sendInOrder({ type: "session_config", ...Object.fromEntries(fields) });
  }

  /** @param {string | ArrayBuffer} data */
  #read(data) {
    this.#endDeadline();
    // An error explains a close that follows it at once, and no later one.
    if (this.#lastNotice?.error) this.#lastNotice = null;
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
    this.#resumable = frame.resumable ?? this.#resumable;
    switch (frame.type) {
      case "session_created":
        return this.#begin(frame);
      case "session_resumed":
        return this.#resume(frame);
      case "input_ack":
        return this.#acknowledged(frame);
      case "pong":
        return typeof frame.t === "number" && this.#emit("rtt", performance.now() - frame.t);
      case "error":
        return this.#complain(frame);
      case "session_closing":
        this.#lastNotice = { closing: frame };
        return this.#emit("frame", frame);
      case "response_started":
        return this.#emit("frame", { ...frame, turn: this.#outgoing.turnOf(frame.sequence_id) });
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

  /* Only what the server never had before is a reason to hope: a connection that opens may end at the same chunk again. */
  /** @param {number} next */
  #taken(next) {
    if (!this.#outgoing.acknowledge(next)) return;
    this.#attempt = 0;
    this.#stuck = { turn: null, tries: 0 };
  }

  /** @param {Frame} frame */
  #acknowledged({ next_sequence_id: next, credit_bytes: credit }) {
    this.#taken(next);
    this.#uplink.acknowledge(next, credit);
  }

  /** @param {Created} frame */
  #begin(frame) {
    const lost = this.#hadSession;
    const { session_id, resume_token } = frame;
    this.#identity = resume_token ? { session_id, resume_token } : null;
    this.#hadSession = true;
    this.#lastOutput = -1;
    this.#resumable = true;
    this.#maxChunkBytes = frame.limits?.max_chunk_bytes ?? Infinity;
    const { frames, turns, lost: incomplete, tooLarge } = this.#outgoing.restart(this.#maxChunkBytes);
    this.#uplink.open();
    this.#nowReady();
    this.#emit("created", { ...frame, lost, resent: turns }); // who hears it configures the session
    for (const turn of incomplete) {
      if (turn !== null) this.#emit("undelivered", { turn, code: tooLarge.has(turn) ? "payload_too_large" : "undeliverable" });
    }
    for (const kept of frames) this.#sendUp(kept);
  }

  /** @param {Resumed} frame */
  #resume(frame) {
    const { session_id, resume_token, next_sequence_id: next } = frame;
    const lacks = next < this.#outgoing.acknowledged; // its store failed: a new session has to follow
    this.#identity = lacks ? null : { session_id, resume_token };
    if (lacks) return this.#closed(1006);
    this.#taken(next);
    const frames = this.#outgoing.resume(next);
    this.#uplink.open(next);
    this.#nowReady({ measured: false }); // its pong comes behind all that is told again
    this.#sendConfiguration(); // it may have been lost on the way
    for (const kept of frames) this.#sendUp(kept);
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
    this.#giveTime(DEAD_MS + Math.ceil(this.#uplink.largestInFlight / SLOWEST_BYTES_PER_MS));
  }

  /** @param {number} milliseconds */
  #giveTime(milliseconds, { anew = false } = {}) {
    if (anew) this.#endDeadline();
    this.#deadline ??= setTimeout(() => this.#closed(1006), milliseconds);
  }

  #endDeadline() {
    clearTimeout(this.#deadline);
    this.#deadline = undefined;
  }

  /** @param {Frame} frame */
  #complain(frame) {
    const { code, param, sequence_id: sequenceId, request_id: requestId } = frame.error;
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
    if (!this.#ready) return; // it is why there is no session: the next state tells it
    const refused = sequenceId === undefined || requestId ? null : this.#outgoing.refuse(sequenceId);
    this.#emit("frame", { ...frame, ...refused });
  }

  /** @param {number} code */
  async #closed(code) {
    const wasReady = this.#ready;
    const notice = this.#explanation(code);
    this.#abandon();
    const reason = code === REPLACED ? "replaced" : notice?.closing?.reason;
    if (/^(replaced|deleted|session_timeout)$/.test(reason)) {
      this.#identity = null;
      return this.#tell("ended", { reason });
    }
    const handedOver = notice?.closing?.resume;
    if (wasReady && !handedOver) this.#blame(code, notice?.error);
    const mayMove = this.#identity && this.#attempt < QUIET_TRIES;
    const refusal = wasReady || notice || mayMove ? null : await this.#refusal();
    const starting = !wasReady && notice?.error?.code === "engine_overloaded" && (await this.#isStarting());
    if (this.#socket || this.state === "ended") return; // opened anew, or closed, meanwhile
    this.starting = starting;
    if (refusal?.key) return this.#tell("refused", { reason: "key" });
    const grown = (this.#identity ? RESUME_MS : RETRY_MS) * 2 ** this.#attempt;
    const wanted = Math.min(grown, this.#attempt++ < PATIENT_FROM ? MOST_MS : PATIENT_MS) * (0.75 + Math.random() / 2);
    const delay = handedOver ? 0 : Math.max(wanted, notice?.error?.retry_after_ms ?? 0);
    this.#tell("waiting", { seconds: delay / 1000, notice: notice ?? refusal, again: this.#hadSession });
    this.#timer = setTimeout(() => this.open(), delay);
  }

  /* What the server said of this close. */
  /** @param {number} code @returns {{ error?: ServerError, closing?: Frame } | null} */
  #explanation(code) {
    const notice = this.#lastNotice;
    this.#lastNotice = null;
    if (!notice?.error) return notice;
    return !this.#ready || !UNEXPLAINED.includes(code) ? notice : null;
  }

  /* A connection has ended. What was sent last is given up where it is to blame: it would end the next one, too. */
  /** @param {number} code @param {ServerError} [error] */
  #blame(code, error) {
    if (error) this.#identity = null; // a session that failed is over
    if (error && OF_THE_MOMENT.includes(error.code)) return;
    const turn = this.#outgoing.stuckAt;
    if (turn === undefined) return;
    this.#stuck = this.#stuck.turn === turn ? { turn, tries: this.#stuck.tries + 1 } : { turn, tries: 1 };
    const isToBlame = error ? OF_THE_INPUT.includes(error.code) : OF_THE_FRAME.includes(code);
    if (!isToBlame && this.#stuck.tries < MAX_TRIES) return;
    // An open microphone goes on where it is: what it said is of no other session.
    if (turn === null) {
      if (isToBlame) this.#identity = null;
      return;
    }
    this.#identity = null; // the session waits for this chunk
    this.#stuck = { turn: null, tries: 0 };
    this.#outgoing.giveUp(turn);
    this.#emit("undelivered", { turn, code: error?.code ?? (code === TOO_LARGE ? "payload_too_large" : "undeliverable") });
  }

  /* A browser does not tell why a handshake was refused; ordinary requests do. */
  /** @returns {Promise<{ key?: true, error?: ServerError } | null>} */
  async #refusal() {
    if (await this.#keyIsRefused()) return { key: true };
    const error = await this.#originIsRefused();
    return error && { error };
  }

  /* Browsers say with a request that may change something of which page it comes. Where the page of another origin may not
     read what is replied, there is a reply all the same. */
  /** @returns {Promise<ServerError | null>} */
  async #originIsRefused() {
    const origin = globalThis.location?.origin;
    if (!origin) return null;
    const reply = await ask(this.healthUrl, { method: "POST" });
    if (reply) {
      const { error } = await contentOf(reply);
      return error?.code === ORIGIN_NOT_ALLOWED ? error : null;
    }
    // On its own origin it does not reply at all.
    if (origin === this.healthUrl.origin || !(await ask(this.healthUrl, { mode: "no-cors" }))) return null;
    const message = `the server does not take pages of ${origin}: start it with --allow-origin ${origin}`;
    return { code: ORIGIN_NOT_ALLOWED, message };
  }

  /* Whether the key is: an ordinary request with the same one is told so. */
  async #keyIsRefused() {
    const key = this.key();
    /** @type {HeadersInit} */
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    return (await ask(this.modelsUrl, { headers }))?.status === 401;
  }

  /* A server that loads its model and one that is full say the same; /health tells them apart. */
  async #isStarting() {
    return (await contentOf(await ask(this.healthUrl))).status === "starting";
  }

  #forget() {
    this.#identity = null;
    this.#hadSession = false;
    this.#outgoing = new Outgoing();
    this.#attempt = 0;
    this.#stuck = { turn: null, tries: 0 };
    this.#lastNotice = null;
  }

  #abandon(code = COMING_BACK) {
    const socket = this.#socket;
    this.#socket = null;
    this.#ready = false;
    this.#uplink.close();
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

/* Null where nothing replies: a server that is stopped takes requests all the same. */
/** @param {URL} url @param {RequestInit} [options] */
function ask(url, options) {
  return fetch(url, { cache: "no-store", signal: AbortSignal.timeout(DEAD_MS), ...options }).catch(() => null);
}

/* The object that is replied; a proxy's own page is none. */
/** @param {Response | null} reply */
async function contentOf(reply) {
  return (await reply?.json().catch(() => null)) ?? {};
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
