/* A conversation over WebRTC, by a call of the server's Realtime API: speech goes as packets, one of which may be lost
   without stopping those behind it. The server plays the answers. A call takes no pictures, tells no times of words, and
   is not resumed: where it breaks, a new one begins, which remembers nothing. */

/** @import { Frame, InputChunk, ServerError, SessionConfig, SessionEvents, Telling } from "../client.js" */
/** @import * as Declared from "../client.js" */

import { CallEvents } from "./call-events.js";
import { CallSpeaker } from "./call-speaker.js";
import { Session } from "./session.js";
import { VoiceClient } from "./voice-client.js";

const RETRY_MS = [500, 1000, 2000, 4000];
const STATISTICS_MS = 4000;
/* From the offer to the first event. */
const SETUP_MS = 15_000;
/* A connection that hears nothing may come back by itself within this time. */
const AWAY_MS = 5000;
/* What was said is still on its way when the button is let go; the server waits for late packets up to 250 ms. */
const SPEECH_TAIL_MS = 300;
/* What the server says only when it has taken something in: then the next call that breaks is made again soon. */
const TAKEN_IN = /^(input_audio_buffer\.(committed|speech_started)|conversation\.item\.(added|created)|response\.created)$/;
const UNREACHABLE = { code: "unreachable", message: "no packets get through by WebRTC" };

/* A VoiceClient whose session is a call. */
export class VoiceCall extends VoiceClient {
  /** @param {Declared.VoiceClientOptions} options */
  constructor(options) {
    super({
      ...options,
      connect: (client) => {
        const speaker = new CallSpeaker(client, /** @type {EventTarget} */ (/** @type {unknown} */ (client)));
        return { speaker, session: new CallSession(client, speaker, options) };
      },
    });
    const session = /** @type {CallSession} */ (/** @type {unknown} */ (this.session));
    this.talk.addEventListener("change", () => session.chooseTrack());
  }

  /* A call hears its microphone only. */
  /** @returns {never} */
  say() {
    throw new Error("a call hears its microphone only");
  }
}

/* A call with the methods and events of a Session. A request is named by the item that asks it. */
export class CallSession extends /** @type {Telling<SessionEvents>} */ (EventTarget) {
  #client;
  #speaker;
  #key;
  #url;
  #finder; // asks the server what it can do, or why it cannot
  /** @type {RTCPeerConnection | null} */
  #peer = null;
  /** @type {RTCDataChannel | null} */
  #channel = null;
  /* Flows while nobody listens to the microphone, so that the server's clock goes on. */
  /** @type {MediaStreamTrack | null} */
  #silence = null;
  /** @type {SessionEvents["created"] | null} */
  #found = null;
  #hadSession = false;
  #attempt = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #statistics;
  /** @type {SessionConfig} */
  #configuration = {};
  /** @type {ServerError | null} */
  #lastError = null;
  #events;
  /* The server would notice only after half a minute that the page is gone. One that comes back calls again. */
  #leave = () => this.#lost();
  #said = 0;
  /* The turn of the button that is being said. */
  /** @type {number | null} */
  #turn = null;
  #ref = "";
  /* Audio that Talk has counted, and that the server has: up to now, and since when on the clock of the AudioContext. */
  #countedMs = 0;
  #listenedMs = 0;
  /** @type {number | null} */
  #listensSince = null;
  /** @type {((direction: "sent" | "received", frame: Frame) => void) | null} */
  onwire = null;
  /** @type {"connecting" | "open" | "waiting" | "refused" | "ended"} */
  state = "ended";
  unacknowledged = 0;
  maxChunkBytes = Infinity;
  endsResults = false;

  /** @param {Declared.VoiceClient} client @param {CallSpeaker} speaker @param {Declared.VoiceClientOptions} options */
  constructor(client, speaker, { url, key = () => "", ...options }) {
    super();
    this.#client = client;
    this.#speaker = speaker;
    this.#key = key;
    this.#url = new URL("v1/realtime/calls", url);
    this.#events = new CallEvents(speaker, {
      tell: (frame) => this.#emit("frame", frame),
      ask: (id) => this.#ask(id),
      placeOf: (audioMs) => this.#placeOf(audioMs),
      detectsTurns: () => this.#detectsTurns,
    });
    this.#finder = new Session(url, key, options);
    this.modelsUrl = this.#finder.modelsUrl;
    this.#finder.addEventListener("state", ({ detail: { state, ...more } }) => {
      if (state !== "open" && more.reason !== "closed") this.#tell(/** @type {Session["state"]} */ (state), more);
    });
    this.#finder.addEventListener("created", ({ detail }) => {
      this.#finder.close();
      this.#call(detail);
    });
    client.sound.addEventListener("change", () => this.chooseTrack());
  }

  get ready() {
    return this.state === "open";
  }

  get starting() {
    return this.#finder.starting;
  }

  /* What is said while there is no call is not kept. */
  get bufferedBytes() {
    return this.ready ? 0 : Infinity;
  }

  open() {
    addEventListener("pagehide", this.#leave);
    this.#hangUp();
    this.#tell("connecting", { again: this.#hadSession });
    this.#finder.open();
  }

  close() {
    removeEventListener("pagehide", this.#leave); // the page keeps all that it would tell
    this.#hangUp();
    this.#finder.close();
    this.#hadSession = false;
    this.#tell("ended", { reason: "closed" });
  }

  startAnew() {
    this.#hadSession = false;
    this.open();
  }

  hurry() {
    if (this.state === "waiting") this.open();
  }

  check() {
    this.hurry(); // the browser itself watches a call
  }

  /** @param {SessionConfig} configuration */
  configure(configuration) {
    this.#configuration = configuration;
    if (!this.ready) return;
    this.#send({ type: "session.update", session: sessionObject(configuration) });
    this.chooseTrack();
  }

  /* False where it cannot be sent. What is heard goes by the track; Talk's chunks of it only tell when. */
  /** @param {InputChunk} chunk */
  sendChunk({ modality, payload, endOfInput = false, turn = null, toolCallId, ref = null }) {
    if (!this.ready) return false;
    if (modality === "audio") {
      this.#ref = ref ?? this.#ref;
      this.#hear(payload, turn, endOfInput);
      return true;
    }
    if (modality !== "text") return false;
    const text = new TextDecoder().decode(payload);
    const id = `item_said_${this.#said++}`;
    const item = toolCallId
      ? { id, type: "function_call_output", call_id: toolCallId, output: text }
      : { id, type: "message", role: "user", content: [{ type: "input_text", text }] };
    const sent = this.#send({ type: "conversation.item.create", item });
    this.#events.asks(id, ref);
    if (sent && endOfInput) this.#ask(id);
    return sent;
  }

  /** @param {number | null} turn */
  hasBegun(turn) {
    return turn !== null && turn === this.#turn;
  }

  answered() {}

  acknowledge() {}

  /* What has come of the answer sounds on until the server's buffer is cleared. */
  /** @param {string} [requestId] */
  cancel(requestId) {
    const id = requestId && this.#events.responseTo(requestId);
    if (id) this.#send({ type: "response.cancel", response_id: id });
    if (!requestId || this.#speaker.playing) this.#send({ type: "output_audio_buffer.clear" });
  }

  /** @param {string} requestId */
  truncate(requestId) {
    const items = this.#events.takeItems(requestId);
    if (!this.ready || items.length === 0) return false;
    for (const id of items) this.#send({ type: "conversation.item.delete", item_id: id });
    queueMicrotask(() => this.#emit("frame", { type: "history_truncated", request_id: requestId }));
    return true;
  }

  // --- the call

  /** @param {SessionEvents["created"]} found */
  async #call(found) {
    if (!found.capabilities.webrtc) return this.#tell("ended", { reason: "no_webrtc" });
    this.#found = found;
    this.#lastError = null;
    const peer = new RTCPeerConnection();
    this.#peer = peer;
    const channel = peer.createDataChannel("oai-events");
    this.#channel = channel;
    channel.onmessage = ({ data }) => this.#read(JSON.parse(data));
    channel.onclose = () => this.#lost();
    peer.addTransceiver("audio", { direction: "sendrecv" });
    peer.ontrack = ({ track }) => this.#speaker.connect(new MediaStream([track]));
    peer.onconnectionstatechange = () => {
      const { connectionState: state } = peer;
      if (state === "failed") this.#lost();
      if (state === "disconnected") setTimeout(() => peer.connectionState === "disconnected" && this.#lost(), AWAY_MS);
    };
    this.#timer = setTimeout(() => this.#lost(UNREACHABLE), SETUP_MS);
    try {
      await peer.setLocalDescription();
      const key = this.#key();
      const headers = { "Content-Type": "application/sdp", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
      const response = await fetch(this.#url, { method: "POST", headers, body: peer.localDescription?.sdp });
      const answer = await response.text();
      if (peer !== this.#peer) return;
      if (!response.ok) {
        const wanted = Number(response.headers.get("Retry-After")) || 0;
        return this.#lost({ ...JSON.parse(answer).error, retry_after_ms: wanted * 1000 });
      }
      await peer.setRemoteDescription({ type: "answer", sdp: answer });
    } catch {
      if (peer === this.#peer) this.#lost();
    }
  }

  /** @param {string} sessionId */
  #begin(sessionId) {
    if (!this.#found) return;
    clearTimeout(this.#timer);
    const { capabilities, ...found } = this.#found;
    const takes = capabilities.input_modalities.filter((one) => one === "text" || one === "audio");
    const lost = this.#hadSession;
    this.#hadSession = true;
    this.#countedMs = this.#listenedMs = 0;
    this.#statistics = setInterval(() => this.#measure(), STATISTICS_MS);
    this.#measure();
    this.#tell("open");
    this.#emit("created", {
      ...found,
      session_id: sessionId,
      capabilities: { ...capabilities, input_modalities: takes, tasks: ["chat"] },
      lost,
      resent: new Set(),
    });
    this.chooseTrack();
  }

  /* The call is over, and was not to be. */
  /** @param {ServerError | null} [error] */
  #lost(error = this.#lastError) {
    if (!this.#peer) return;
    this.#hangUp();
    if (error?.code === "session_timeout") return this.#tell("ended", { reason: error.code });
    if (error?.code === "unauthenticated") return this.#tell("refused", { reason: "key" });
    const wanted = RETRY_MS[Math.min(this.#attempt++, RETRY_MS.length - 1)] * (0.75 + Math.random() / 2);
    const delay = Math.max(wanted, error?.retry_after_ms ?? 0);
    this.#tell("waiting", { seconds: delay / 1000, notice: error && { error }, again: this.#hadSession });
    this.#timer = setTimeout(() => this.open(), delay);
  }

  #hangUp() {
    clearTimeout(this.#timer);
    clearInterval(this.#statistics);
    const [peer, channel] = [this.#peer, this.#channel];
    this.#peer = this.#channel = this.#turn = this.#listensSince = null;
    this.#events.clear();
    this.#speaker.flush();
    if (channel) channel.onclose = channel.onmessage = null;
    if (peer) peer.onconnectionstatechange = null;
    peer?.close();
  }

  async #measure() {
    const peer = this.#peer;
    const reports = [...((await peer?.getStats()) ?? new Map()).values()];
    const seconds = reports.find(({ type, nominated }) => type === "candidate-pair" && nominated)?.currentRoundTripTime;
    if (seconds !== undefined && peer === this.#peer) this.#emit("rtt", seconds * 1000);
  }

  // --- the microphone

  get #detectsTurns() {
    return Boolean(this.#configuration.turn_detection);
  }

  /* The microphone is sent while it is listened to, and no longer: it may be open to show its level. */
  chooseTrack() {
    const { sound, microphone, talk } = this.#client;
    const { context } = sound;
    if (!context) this.#silence = this.#listensSince = null; // the next one has another clock
    const [transceiver] = this.#peer?.getTransceivers() ?? [];
    if (!transceiver || !context || !this.ready) return;
    this.#silence ??= context.createMediaStreamDestination().stream.getTracks()[0];
    const sent = this.#detectsTurns || this.#turn !== null;
    const heard = talk.phase === "listening" || this.#turn !== null ? microphone.track : null;
    const track = sent ? (heard ?? this.#silence) : null;
    if (transceiver.sender.track !== track) transceiver.sender.replaceTrack(track).catch(() => {}); // the call has ended
    const listens = sent && this.#detectsTurns;
    if (listens) this.#listensSince ??= context.currentTime;
    else if (this.#listensSince !== null) {
      this.#listenedMs += (context.currentTime - this.#listensSince) * 1000;
      this.#listensSince = null;
    }
  }

  /** @param {Uint8Array} payload @param {number | null} turn @param {boolean} endOfInput */
  #hear(payload, turn, endOfInput) {
    if (turn === null) {
      this.#countedMs += (payload.length / 2 / (this.#client.sound.rate ?? Infinity)) * 1000;
      if (endOfInput) this.#send({ type: "input_audio_buffer.commit" });
      return;
    }
    if (this.#turn !== turn) {
      this.#turn = turn;
      this.#send({ type: "input_audio_buffer.clear" });
      this.chooseTrack();
    }
    if (endOfInput) setTimeout(() => this.#endTurn(turn), SPEECH_TAIL_MS);
  }

  /** @param {number} turn */
  #endTurn(turn) {
    if (this.#turn !== turn) return;
    this.#turn = null;
    this.chooseTrack();
    this.#events.commits(this.#ref);
    this.#send({ type: "input_audio_buffer.commit" });
  }

  /* Where Talk's count of the audio has what the server's has at `audioMs`. */
  /** @param {number} audioMs */
  #placeOf(audioMs) {
    const { context } = this.#client.sound;
    if (this.#listensSince === null || !context) return Math.round(this.#countedMs);
    const nowMs = this.#listenedMs + (context.currentTime - this.#listensSince) * 1000;
    return Math.round(this.#countedMs - (nowMs - audioMs));
  }

  // --- events

  /** @param {Frame} event @returns {boolean} */
  #send(event) {
    if (this.#channel?.readyState !== "open") return false;
    try {
      this.#channel.send(JSON.stringify(event));
    } catch {
      return false; // longer than the server takes
    }
    this.onwire?.("sent", event);
    return true;
  }

  /** @param {string} id */
  #ask(id) {
    this.#send({ type: "response.create", response: { metadata: { asked: id } } });
  }

  /** @param {Frame} event */
  #read(event) {
    this.onwire?.("received", event);
    if (event.type === "session.created") return this.#begin(event.session.id ?? "");
    if (TAKEN_IN.test(event.type)) this.#attempt = 0;
    this.#lastError = event.type === "error" ? event.error : null; // the last event of a call says why it ends
    this.#events.read(event);
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

/* The session object of the Realtime API for a session_config. */
/** @param {any} configuration */
function sessionObject({ input_audio: heard, instructions = null, modalities, tools, tool_filler: fills = true, turn_detection: detection, voice = null }) {
  /** @param {{ function: object }} tool */
  const described = ({ function: fields, ...rest }) => ({ ...rest, ...fields });
  const keywords = heard?.keywords?.join(", ");
  return {
    type: "realtime",
    instructions,
    output_modalities: modalities?.includes("audio") === false ? ["text"] : ["audio"],
    tools: (tools ?? []).map(described),
    tool_filler: fills ?? true,
    audio: {
      input: {
        transcription: { model: "default", language: heard?.language ?? null, ...(keywords && { prompt: `${keywords}.` }) },
        turn_detection: detection && { ...detection, interrupt_resume: undefined },
      },
      output: { voice },
    },
  };
}
