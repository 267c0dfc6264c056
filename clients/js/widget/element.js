/* The element <voice-chat src="wss://host/v1/streaming_input">: an orb, the words, a button to talk and one to mute, and a
   line to write. It connects when somebody talks or writes. Attributes: `src`, `client-secret`, `voice`, `language`,
   `instructions`. Events, with their `detail`:

   state       { state }                 as of a VoiceChat
   transcript  { id, text, final }       what was said: all of it so far
   answer      { id, text, final }       an answer: all of it so far
   error       { code, message } */

/** @import { ChatLine, ChatOptions, Shown } from "../chat.js" */
/** @import { Look } from "./orb.js" */

import { VoiceChat } from "./chat.js";
import { Orb } from "./orb.js";
import { rangeOf } from "./spoken-word.js";
import { STYLE } from "./style.js";

const OPTIONS = ["client-secret", "voice", "language", "instructions"];
/* What the orb shows of a state, and the words for it. */
/** @type {Record<Shown["state"], [Look, string]>} */
const STATES = {
  idle: ["ready", "Ready"],
  connecting: ["busy", "Connecting"],
  waiting: ["away", "Trying to connect"],
  refused: ["away", "Not admitted"],
  ended: ["ready", "Ready"],
  starting: ["busy", "The server is starting"],
  opening: ["opening", "Opening the microphone"],
  hearing: ["hearing", "Hearing you"],
  speaking: ["speaking", "Speaking"],
  ducked: ["ducked", "Speaking"],
  thinking: ["busy", "Thinking"],
  listening: ["listening", "Listening"],
  muted: ["muted", "Muted"],
  ready: ["ready", "Ready"],
};
/** @type {Record<string, string>} */
const ERRORS = {
  NotAllowedError: "The browser does not let this page use the microphone. Allow it beside the address of the page, or write.",
  NotFoundError: "No microphone was found. Plug one in and try again, or write.",
  NotReadableError: "The microphone could not be opened: another program may be using it.",
  LostError: "The microphone went away.",
  InsecureContext: "Browsers give the microphone only to pages that come over https. You can write.",
  SoundLocked: "The browser does not start the sound. Try again, or write.",
  SoundUnavailable: "This page's policy does not let the sound be loaded.",
  unauthenticated: "The server does not admit this page: its client secret is missing or has expired.",
  session_timeout: "The conversation was closed, because nothing happened for long.",
  deleted: "This conversation was deleted.",
  replaced: "This conversation goes on in another window.",
};
/* The colours of the orb by their names here. */
const COLOURS = {
  "--orb-you": "--voice",
  "--orb-server": "--answer",
  "--orb-work": "--work",
  "--orb-rest": "--still",
  "--paper": "--sheet",
  "--bad": "--wrong",
};
/* The transcript follows its end where the reader is no further from it. */
const NEAR_END = 40;

/** @type {CSSStyleSheet | undefined} */
let sheet;

/* Where a page is made by a server, there are no elements, and this is only named. */
const Base = globalThis.HTMLElement ?? /** @type {typeof HTMLElement} */ (class {});

export class VoiceChatElement extends Base {
  static observedAttributes = ["src", "key", ...OPTIONS];
  /** @type {VoiceChat | null} */
  #chat = null;
  #placed = false; // whether all attributes that the page has are there
  #src = "";
  #wrong = ""; // why there is no conversation
  #told = ""; // as an event
  #said = ""; // to screen readers
  #parts = makeParts();
  #orb = new Orb(this.#parts.orb);
  #colours = "";
  /* While it is in the page. */
  /** @type {AbortController | null} */
  #watching = null;
  /** @type {Map<string, HTMLElement>} */
  #lines = new Map();

  constructor() {
    super();
    const root = this.attachShadow({ mode: "open" });
    root.adoptedStyleSheets = [(sheet ??= made(STYLE))];
    const { orb, state, log, error, announcement, form, text, talk, mute } = this.#parts;
    const section = make("section", "chat");
    section.setAttribute("aria-label", "Voice chat");
    section.append(orb, state, error, log, announcement, row(talk, mute), form);
    root.append(section);
    talk.onclick = () => (this.#chat?.shown.talking ? this.stop() : this.start());
    mute.onclick = () => this.mute();
    form.onsubmit = (event) => {
      event.preventDefault();
      const written = text.value.trim();
      if (written) this.send(written).catch(() => {}); // it was told
      text.value = "";
    };
    root.addEventListener("keydown", (event) => {
      if (/** @type {KeyboardEvent} */ (event).key === "Escape") this.#chat?.client.interrupt();
    });
    this.#show();
  }

  connectedCallback() {
    this.#placed = true;
    this.#watching = new AbortController();
    const { signal } = this.#watching;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#paint(), { signal });
    this.#orb.watch(signal);
    this.#prepare();
    this.#paint();
  }

  /* Also called where the page moves the element. */
  disconnectedCallback() {
    this.#watching?.abort();
    queueMicrotask(() => this.isConnected || this.#chat?.close());
  }

  /** @param {string} _name @param {string | null} before @param {string | null} value */
  attributeChangedCallback(_name, before, value) {
    if (before !== value && this.#placed) this.#prepare();
  }

  /* As of a VoiceChat. */
  get state() {
    return this.#chat?.shown.state ?? "idle";
  }

  get transcript() {
    return this.#chat?.shown.transcript ?? [];
  }

  /* Call it from a gesture. */
  async start() {
    await this.#needed().start();
  }

  stop() {
    this.#chat?.stop();
  }

  /** @param {boolean} [muted] */
  mute(muted) {
    this.#chat?.mute(muted);
  }

  /** @param {string} text */
  async send(text) {
    await this.#needed().send(text);
  }

  #needed() {
    if (!this.#chat) throw new TypeError(this.#wrong);
    return this.#chat;
  }

  /* Have a conversation for what the attributes say, or say what is wrong with them. */
  #prepare() {
    try {
      const options = this.#options;
      if (options.url !== this.#src) this.#leave();
      this.#src = `${options.url}`;
      if (this.#chat) this.#chat.configure(options);
      else this.#begin(new VoiceChat(options));
      this.#wrong = "";
    } catch (error) {
      this.#leave();
      this.#wrong = /** @type {Error} */ (error).message.replaceAll("clientSecret", "client-secret");
      this.#tell("error", { code: "invalid_attribute", message: this.#wrong });
    }
    this.#show();
  }

  /** @returns {ChatOptions} */
  get #options() {
    const url = this.getAttribute("src");
    if (!url) throw new TypeError("src is missing: the address of the server, wss://host/v1/streaming_input");
    const [clientSecret, voice, language, instructions] = OPTIONS.map((name) => this.getAttribute(name) ?? "");
    const key = this.hasAttribute("key") && { key: "" }; // is refused
    return { url, clientSecret, voice, language, instructions, ...key };
  }

  /** @param {VoiceChat} chat */
  #begin(chat) {
    this.#chat = chat;
    chat.addEventListener("change", () => this.#show());
    chat.addEventListener("level", ({ detail: { side, peak } }) => this.#orb.add(side, peak));
    chat.addEventListener("interrupted", () => this.#orb.interrupt());
    chat.addEventListener("error", ({ detail }) => this.#tell("error", detail));
    for (const [name, told] of /** @type {const} */ ([["said", "transcript"], ["answered", "answer"]])) {
      chat.addEventListener(name, ({ detail: { line } }) => {
        this.#tell(told, { id: line.id, text: line.text + line.interim, final: line.done });
        if (told === "answer" && line.done && !chat.shown.speaks) this.#parts.announcement.textContent = line.text;
      });
    }
  }

  #leave() {
    this.#chat?.close();
    this.#chat = null;
  }

  #show() {
    const shown = this.#chat?.shown;
    const { state: place, error, form, text, talk, mute } = this.#parts;
    const state = shown?.state ?? "idle";
    const [look, words] = STATES[state];
    this.#orb.show(look);
    setText(place, shown ? words : "Not available");
    const talking = shown?.talking ?? false;
    this.#tellHand(shown);
    const hears = shown?.hears ?? true;
    setText(talk, !talking ? "Start talking" : this.#chat?.client.talk.phase === "talking" ? "Send" : "Stop");
    talk.hidden = mute.hidden = !hears;
    talk.disabled = text.disabled = !shown;
    mute.disabled = !talking;
    mute.setAttribute("aria-pressed", String(shown?.muted ?? false));
    form.hidden = !shown;
    const wrong = shown?.error;
    setText(error, this.#wrong || (wrong ? (ERRORS[wrong.code] ?? (wrong.message || wrong.code)) : ""));
    error.hidden = error.textContent === "";
    this.#showLines(shown?.transcript ?? []);
    if (state === this.#told || !shown) return;
    this.#told = state;
    this.#paint();
    this.#tell("state", { state });
  }

  /* Said to screen readers: what somebody's own hand has changed, once it holds. Who speaks is heard anyway, and what a
     screen reader said of it would be talked over, and be heard by the microphone. */
  /** @param {Shown | undefined} shown */
  #tellHand(shown) {
    if (!shown) return;
    const { state, talking, muted } = shown;
    const words = muted && talking ? "Muted" : state === "listening" ? "Listening" : state === "ready" && !talking ? "Ready" : this.#said;
    if (words !== this.#said) this.#parts.announcement.textContent = words;
    this.#said = words;
  }

  /** @param {readonly ChatLine[]} lines */
  #showLines(lines) {
    const { log } = this.#parts;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    const gone = new Set(this.#lines.keys());
    /** @type {Range | null} */
    let spoken = null;
    for (const { id, who, text, interim, error, spoken: place } of lines) {
      gone.delete(id);
      const line = this.#lines.get(id) ?? log.appendChild(makeLine(who));
      this.#lines.set(id, line);
      const [, settled, open] = line.children;
      setText(settled, text || ERRORS[error ?? ""] || error || "");
      setText(open, interim);
      line.classList.toggle("failed", Boolean(error));
      if (place) spoken = rangeOf(settled, ...place);
    }
    for (const id of gone) {
      this.#lines.get(id)?.remove();
      this.#lines.delete(id);
    }
    log.hidden = lines.length === 0;
    showSpoken(this, spoken);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  /* The orb knows its colours as #rrggbb alone; those of the page may be of any kind. */
  #paint() {
    if (!this.isConnected) return;
    const { orb } = this.#parts;
    const colours = Object.entries(COLOURS).map(([name, property]) => {
      orb.style.color = `var(${property})`;
      return [name, hexOf(getComputedStyle(orb).color)];
    });
    const told = JSON.stringify(colours);
    if (told === this.#colours) return;
    this.#colours = told;
    for (const [name, colour] of colours) orb.style.setProperty(name, colour);
    this.#orb.repaint();
  }

  /** @param {string} name @param {object} detail */
  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

function makeParts() {
  const orb = make("div", "orb");
  orb.setAttribute("aria-hidden", "true"); // `state` says it
  const state = make("p", "state");
  const error = make("p", "error");
  error.setAttribute("role", "alert");
  const log = make("div", "log");
  log.tabIndex = 0;
  log.setAttribute("role", "log");
  log.setAttribute("aria-live", "off"); // it is spoken
  log.setAttribute("aria-label", "Conversation");
  const announcement = make("p", "for-readers");
  announcement.setAttribute("role", "status");
  const talk = button("talk", "Start talking");
  const mute = button("mute", "Mute");
  const form = make("form", "row write");
  const text = make("input", "text");
  text.setAttribute("aria-label", "Write");
  text.placeholder = "Or write";
  text.autocomplete = "off";
  form.append(text);
  return { orb, state, error, log, announcement, talk, mute, form, text };
}

/** @param {ChatLine["who"]} who */
function makeLine(who) {
  const line = make("p", who);
  const label = make("span", "for-readers");
  label.textContent = who === "you" ? "You: " : "Answer: ";
  line.append(label, make("span", "words"), make("span", "interim"));
  return line;
}

/** @template {keyof HTMLElementTagNameMap} Tag @param {Tag} tag @param {string} name also of its part */
function make(tag, name) {
  const node = document.createElement(tag);
  node.className = name;
  node.setAttribute("part", name);
  return node;
}

/** @param {string} name @param {string} text */
function button(name, text) {
  const node = make("button", name);
  node.type = "button";
  node.textContent = text;
  return node;
}

/** @param {HTMLElement[]} nodes */
function row(...nodes) {
  const node = make("div", "row controls");
  node.append(...nodes);
  return node;
}

/** @param {Element} node @param {string} text */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {string} style */
function made(style) {
  const one = new CSSStyleSheet();
  one.replaceSync(style);
  return one;
}

/* All widgets of a page share one mark, as far as the browser has any. */
/** @type {WeakMap<object, Range>} */
const marked = new WeakMap();
/** @param {object} owner @param {Range | null} range */
function showSpoken(owner, range) {
  if (typeof Highlight === "undefined") return;
  if (!CSS.highlights.has("spoken")) CSS.highlights.set("spoken", new Highlight());
  const highlight = /** @type {Highlight} */ (CSS.highlights.get("spoken"));
  const before = marked.get(owner);
  if (before) highlight.delete(before);
  marked.delete(owner);
  if (range) marked.set(owner, range);
  if (range) highlight.add(range);
}

/** @param {string} colour of any kind */
function hexOf(colour) {
  const pen = /** @type {OffscreenCanvasRenderingContext2D} */ (new OffscreenCanvas(1, 1).getContext("2d"));
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  return `#${[red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("")}`;
}
