/* A conversation as a user interface shows it: a VoiceClient, which connects when the user begins to talk or to write, and
   the state to show, as values that are replaced and never change. `voice-chat` and the hook for React are built on it.
   Events:

   change              `shown` is another value
   said     { line }   a message of the user, or its transcript so far
   answered { line }   an answer, or its text so far
   interrupted         an answer was cut short
   level    { side, peak }  20 ms of sound of "you" or "server" (0 to 1)
   error    { code, message }  what went wrong, also in `shown.error` until the next start */

/** @import { Telling, Turn } from "../client.js" */
/** @import { ChatError, ChatEvents, ChatLine, ChatOptions, Shown } from "../chat.js" */

import { VoiceClient } from "../client/voice-client.js";
import { placesOf } from "./spoken-word.js";

const PATH = /v1\/streaming_input\/?$/;
const SECRET = /^ek_/;
/* How long behind its end a word still counts as the one that sounds. */
const LINGER_MS = 250;
const WANTS_SECRET =
  "A key does not belong into a page, where everybody can read it. Have your server make a client secret " +
  "(POST /v1/streaming_input/client_secrets), and give that as clientSecret.";

export class VoiceChat extends /** @type {Telling<ChatEvents>} */ (EventTarget) {
  /* How loud both sides are, from 0 to 1; it changes without an event. */
  levels = { you: 0, server: 0 };
  #options;
  /** @type {Readonly<ChatLine>[]} */
  #lines = [];
  /** @type {Map<string, number>} */
  #places = new Map();
  /** @type {ChatError | null} */
  #error = null;
  /* Options that were given once: without them, the server is told to take its own choice back. */
  /** @type {Set<string>} */
  #given = new Set();
  #begins = false; // whether somebody wants to talk as soon as there is a session
  #presented = ""; // the client secret that the server was given last
  /** @type {AbortController | null} */
  #watching = null;
  /** @type {Shown | null} */
  #shown = null;

  /* `url` is the server's, as its address (https:) or as that of its WebSocket (wss:, with the path). */
  /** @param {ChatOptions} options */
  constructor(options) {
    super();
    refuseKey(options);
    this.#options = options;
    this.client = new VoiceClient({
      url: serverOf(options.url),
      key: () => (this.#presented = this.#secret),
      config: () => this.#config,
      tools: options.tools,
    });
    this.#listenToSession();
    this.#listenToSound();
  }

  /* What is to be shown: the same value until something of it changes. */
  get shown() {
    const { client } = this;
    this.#shown ??= Object.freeze({
      state: client.session.state === "ended" ? "idle" : client.state,
      transcript: Object.freeze([...this.#lines]),
      muted: client.talk.muted,
      talking: client.talk.phase !== "off" || this.#begins,
      hears: client.capabilities?.input_modalities.includes("audio") ?? true,
      speaks: client.capabilities?.output_modalities.includes("audio") ?? true,
      error: this.#error,
    });
    return this.#shown;
  }

  /* Listen: call it from a gesture. The microphone is opened once there is a session. */
  async start() {
    this.#tellError(null);
    this.#begins = true;
    this.#changed();
    if (this.#connect()) return this.#listen();
    await this.client.sound.wake().catch(() => {}); // the gesture counts now; what is wrong is told when it listens
  }

  /* Close the microphone and stop the answer; a turn of a server that cannot hear where it ends is sent. */
  stop() {
    const { talk } = this.client;
    this.#begins = false;
    if (!this.client.capabilities) this.client.close(); // nobody has answered so far
    if (talk.mode === "open" || talk.phase === "off") this.client.interrupt();
    talk.stop();
    this.levels.you = 0;
    this.#changed();
  }

  /** @param {boolean} [muted] */
  mute(muted = !this.client.talk.muted) {
    this.client.talk.mute(muted);
  }

  /* Write in place of talking. */
  /** @param {string} text */
  async send(text) {
    this.#tellError(null);
    this.#connect();
    await this.client.write(text);
  }

  /* Another voice, language, or anything else of the options but `url`, from now on. A conversation whose client secret
     had expired goes on with another. */
  /** @param {ChatOptions} options */
  configure(options) {
    refuseKey(options);
    const told = () => JSON.stringify([this.#config, this.client.tools]);
    const before = told();
    this.#options = options;
    this.client.tools = options.tools ?? {};
    if (told() !== before) this.client.configure();
    const { session, capabilities } = this.client;
    if (session.state !== "refused" || !capabilities || this.#secret === this.#presented) return;
    this.#tellError(null);
    this.client.open();
  }

  close() {
    this.#begins = false;
    this.#watching?.abort();
    this.#watching = null;
    this.client.close();
    this.#changed();
  }

  /* What is no secret is not sent. */
  get #secret() {
    const { clientSecret = "" } = this.#options;
    const secret = typeof clientSecret === "function" ? clientSecret() : clientSecret;
    return SECRET.test(secret) ? secret : "";
  }

  /* What is not given is the server's own choice, or that of the client secret. */
  get #config() {
    const { voice, language, instructions, config = {} } = this.#options;
    for (const [name, value] of Object.entries({ voice, language, instructions })) if (value) this.#given.add(name);
    /** @param {string} name @param {string | undefined} value */
    const field = (name, value) => this.#given.has(name) && { [name]: value || null };
    const heard = { ...field("language", language), .../** @type {object | undefined} */ (config.input_audio) };
    return { ...field("voice", voice), ...field("instructions", instructions), ...config, input_audio: heard };
  }

  /* Whether there is a session already. */
  #connect() {
    const { session } = this.client;
    if (session.ready) return true;
    this.#watch();
    if (session.state === "ended" || session.state === "refused") this.client.open();
    else session.hurry();
    return false;
  }

  /* A page that was away may have lost its sound and its connection. */
  #watch() {
    if (this.#watching || !globalThis.document) return;
    this.#watching = new AbortController();
    const { signal } = this.#watching;
    const { session, sound } = this.client;
    for (const gesture of ["pointerup", "keydown"]) document.addEventListener(gesture, () => sound.revive(), { signal });
    addEventListener("online", () => session.hurry(), { signal });
    const seen = () => {
      if (document.hidden) return;
      sound.revive();
      session.check();
    };
    document.addEventListener("visibilitychange", seen, { signal });
  }

  async #listen() {
    this.#begins = false;
    if (this.client.talk.phase === "off" && this.shown.hears) await this.client.listen().catch(() => {}); // `error` has told
    this.#changed();
  }

  #listenToSession() {
    const { client } = this;
    const { session } = client;
    for (const begun of /** @type {const} */ (["created", "resumed"])) {
      session.addEventListener(begun, () => this.#begins && this.#listen()); // the client has configured it by now
    }
    session.addEventListener("state", ({ detail: { state, reason } }) => {
      if (state === "refused") {
        this.#begins = false;
        this.#tellError({ code: "unauthenticated", message: "the server wants a client secret that it knows" });
      } else if (state === "ended" && reason !== "closed") this.#tellError({ code: reason ?? "ended", message: "" });
    });
    client.addEventListener("change", () => this.#changed());
    client.addEventListener("error", ({ detail: { error } }) => this.#tellError({ code: error.code, message: error.message }));
    client.addEventListener("turn", ({ detail: { turn } }) => this.#show(turn));
  }

  #listenToSound() {
    const { talk, speaker, conversation } = this.client;
    talk.addEventListener("level", ({ detail: { peak } }) => this.#hear("you", peak));
    speaker.addEventListener("level", ({ detail }) => {
      this.#hear("server", detail.peak);
      const { playingId } = speaker;
      if (playingId !== undefined) this.#mark(conversation.turns[playingId], speaker.playedMs);
    });
    for (const end of /** @type {const} */ (["ended", "flushed"])) {
      speaker.addEventListener(end, ({ detail: { id } }) => {
        this.#hear("server", 0);
        if (conversation.turns[id]) this.#mark(conversation.turns[id], undefined);
        if (end === "flushed") this.dispatchEvent(new Event("interrupted"));
      });
    }
  }

  /* Both lines of a turn. */
  /** @param {Turn} turn */
  #show({ number, kind, user, answer, dropped }) {
    const said = kind !== "greeting" && kind !== "tool" && !dropped && (user.text !== "" || user.interim !== "");
    const interim = (user.text && user.interim ? " " : "") + user.interim;
    this.#put(said, { id: `${number}-you`, who: "you", text: user.text, interim, done: user.done && !interim, spoken: null });
    const done = answer.finishReason !== null || ["done", "stopped", "failed"].includes(answer.state);
    const error = answer.state === "failed" ? answer.error || "failed" : "";
    const told = !dropped && (answer.text !== "" || error !== "");
    const spoken = this.#lines[this.#places.get(`${number}-server`) ?? -1]?.spoken ?? null;
    this.#put(told, { id: `${number}-server`, who: "server", text: answer.text, interim: "", done, spoken, ...(error && { error }) });
  }

  /* A line in its place, told where its words are others. */
  /** @param {boolean} wanted @param {ChatLine} line */
  #put(wanted, line) {
    const place = this.#places.get(line.id);
    if (!wanted) return place === undefined ? undefined : this.#remove(place);
    const known = place === undefined ? undefined : this.#lines[place];
    const { text, interim, done, error } = known ?? {};
    if (known && text === line.text && interim === line.interim && done === line.done && error === line.error) return;
    if (place === undefined) this.#places.set(line.id, this.#lines.push(Object.freeze(line)) - 1);
    else this.#lines[place] = Object.freeze(line);
    this.dispatchEvent(new CustomEvent(line.who === "you" ? "said" : "answered", { detail: { line } }));
    this.#changed();
  }

  /** @param {number} place */
  #remove(place) {
    this.#lines.splice(place, 1);
    this.#places = new Map(this.#lines.map(({ id }, index) => [id, index]));
    this.#changed();
  }

  /* The word that sounds at `ms` of an answer. */
  /** @param {Turn} turn @param {number | undefined} ms */
  #mark({ number, answer: { words, text } }, ms) {
    const place = this.#places.get(`${number}-server`);
    if (place === undefined) return;
    const found = ms === undefined ? -1 : words.findLastIndex((word) => word.start_ms <= ms && ms <= word.end_ms + LINGER_MS);
    const spoken = found < 0 ? null : (placesOf(words.slice(0, found + 1), text).at(-1) ?? null);
    if (spoken?.[0] === this.#lines[place].spoken?.[0]) return;
    this.#lines[place] = Object.freeze({ ...this.#lines[place], spoken });
    this.#changed();
  }

  /** @param {"you" | "server"} side @param {number} peak */
  #hear(side, peak) {
    this.levels[side] = peak;
    this.dispatchEvent(new CustomEvent("level", { detail: { side, peak } }));
  }

  /** @param {ChatError | null} error */
  #tellError(error) {
    this.#error = error;
    if (error) this.dispatchEvent(new CustomEvent("error", { detail: error }));
    this.#changed();
  }

  #changed() {
    this.#shown = null;
    this.dispatchEvent(new Event("change"));
  }
}

/* The address of a server, given that or the address of its WebSocket. */
/** @param {string | URL} address */
export function serverOf(address) {
  const url = new URL(address, globalThis.location?.href);
  if (url.protocol === "ws:") url.protocol = "http:";
  if (url.protocol === "wss:") url.protocol = "https:";
  if (!/^https?:$/.test(url.protocol)) throw new TypeError(`${address} is no address of a server: it begins with wss: or https:`);
  url.pathname = url.pathname.replace(PATH, "").replace(/\/*$/, "/");
  url.search = url.hash = "";
  return url.href;
}

/** @param {ChatOptions} options */
function refuseKey(options) {
  if ("key" in options) throw new TypeError(`key: ${WANTS_SECRET}`);
  const { clientSecret } = options;
  if (typeof clientSecret === "string" && clientSecret && !SECRET.test(clientSecret)) {
    throw new TypeError(`clientSecret: this is none, it does not begin with ek_. ${WANTS_SECRET}`);
  }
}
