/* The conversation on the page. Only what changed is touched, and what is read stays where it is: the view follows the
   newest line, or the word that sounds where that stands higher, only while the reader is there. */

import { duration, ofAnswer } from "./plain-words.js";
import { link, showRichText } from "./rich-text.js";
import { markSpoken, markUnheard } from "../widget/spoken-word.js";

const NEAR_END = 80;
/* Where the line that sounds stands in the view: so much of its height from the top. */
const SPOKEN_AT = 0.4;

export class ConversationView {
  #log;
  #welcome;
  #nodes = new Map();
  #following = true;
  #placed = 0; // where the view was put by this page, and by no reader
  #spoken = null; // the range of the word that sounds
  #actions;
  /* Whether the server says which words were said to it. */
  transcripts = true;

  /* `actions` are copy(text), retry(turn), edit(turn) and replay(turn). */
  constructor(log, welcome, actions) {
    this.#log = log;
    this.#actions = actions;
    this.#welcome = welcome;
    log.addEventListener("scroll", () => {
      if (Math.abs(log.scrollTop - this.#placed) > 1) this.#following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    });
    // A message above it, the keyboard of a phone, and turning the phone take room from it.
    new ResizeObserver(() => this.#follow()).observe(log);
  }

  show(turn) {
    let nodes = this.#nodes.get(turn.number);
    if (!nodes) {
      if (turn.dropped) return;
      nodes = makeTurn(turn, this.#actions);
      this.#nodes.set(turn.number, nodes);
      this.#log.append(nodes.turn);
    }
    nodes.turn.hidden = turn.dropped || wentUnheard(turn);
    if (turn.dropped) {
      nodes.turn.remove();
      this.#nodes.delete(turn.number);
    }
    if (!this.#welcome.hidden) this.#following = true; // wherever the welcome was read
    this.#welcome.hidden = this.#nodes.size > 0;
    this.#showUser(nodes, turn);
    this.#showAnswer(nodes, turn);
    this.#follow();
  }

  /* Mark the word that sounds at `ms` of a turn's answer; without a turn, none. */
  speak(turn, ms) {
    const nodes = turn && this.#nodes.get(turn.number);
    const spoken = markSpoken(nodes?.words, turn?.answer.words ?? [], nodes ? ms : undefined);
    if (spoken || !nodes) this.#spoken = spoken; // between two words the view stays
    if (spoken) this.#follow();
  }

  #follow() {
    if (!this.#following || !this.#welcome.hidden) return; // a welcome is read from its beginning
    const log = this.#log;
    const end = log.scrollHeight - log.clientHeight;
    const line = this.#spoken?.getBoundingClientRect();
    if (line?.height === 0) return; // its text was just written anew; the next word is near
    const top = line ? line.top - log.getBoundingClientRect().top + log.scrollTop : Infinity;
    const wanted = Math.max(0, Math.min(end, top - SPOKEN_AT * log.clientHeight));
    if (Math.abs(log.scrollTop - wanted) > 1) log.scrollTop = wanted;
    this.#placed = log.scrollTop;
  }

  #showUser({ you, settled, interim, images, tools, replay }, { kind, user, answer, sound }) {
    you.hidden = kind === "greeting" || kind === "tool";
    setText(settled, user.text);
    const rest = user.interim ? (user.text ? " " : "") + user.interim : "";
    const wordless = !user.text && !rest && !user.images.length;
    setText(interim, rest || (wordless ? withoutWords(user, answer, this.transcripts) : ""));
    you.classList.toggle("open", !user.done);
    tools.hidden = !user.done || !user.text;
    replay.hidden = sound.user.length === 0;
    if (images.childElementCount !== user.images.length) images.replaceChildren(...user.images.map(makeImage));
  }

  #showAnswer({ server, words, calls, sources, note, copy }, turn) {
    const { answer } = turn;
    server.hidden = answer.state === "none";
    server.dataset.state = answer.state;
    showRichText(words, answer.text);
    markUnheard(words, answer.words, answer.state === "stopped" ? turn.heardMs : null);
    copy.hidden = !answer.text || !["done", "stopped"].includes(answer.state);
    showCalls(calls, answer.calls);
    showSources(sources, answer.annotations);
    const said = [];
    if (turn.firstSoundMs !== null) said.push(whole(`first sound after ${duration(turn.firstSoundMs)}`));
    if (answer.state === "stopped") said.push(turn.heardMs ? whole(`stopped after ${seconds(turn.heardMs)}`) : "stopped");
    const used = answer.calls.map(({ name }) => name).join(", ");
    if (used) said.push(`used ${used}`);
    else if (answer.state === "done" && !answer.text) said.push(turn.sound.server.length ? "sound without words" : "no answer");
    if (answer.finishReason === "length") said.push("cut off at the length limit");
    if (answer.error) said.push(ofAnswer(answer.error, answer.reason));
    else if (answer.state === "failed") said.push("no answer came");
    setText(note, said.join(" · "));
  }
}

/* A cough during an answer, which went on. */
function wentUnheard({ interrupts, user, answer }) {
  return interrupts && answer.state === "done" && !user.text && !user.images.length && !answer.text && !answer.calls.length;
}

/* What stands for words that did not come. Of a turn that was stopped nobody knows whether there were any. */
function withoutWords(user, answer, transcripts) {
  if (!user.done || answer.state === "thinking") return "…";
  return answer.state === "stopped" || !transcripts ? "(not transcribed)" : "(nothing was heard)";
}

/* Each call of a tool as a card: what was asked, and what came of it. */
function showCalls(place, calls) {
  const told = JSON.stringify(calls);
  if (place.dataset.source === told) return;
  place.dataset.source = told;
  place.replaceChildren(
    ...calls.filter(Boolean).map(({ name, arguments: given, result }) => {
      const card = make("details", "call");
      const title = make("summary");
      title.textContent = result === undefined ? `${name} …` : name;
      card.append(title, code(given || "{}"));
      if (result !== undefined) card.append(code(result));
      return card;
    }),
  );
}

/* The pages that an answer is taken from, each once. What is no address of the web by https is left out. */
function showSources(place, annotations) {
  const told = JSON.stringify(annotations);
  if (place.dataset.source === told) return;
  place.dataset.source = told;
  const pages = new Map(annotations.filter(({ url }) => /^https:\/\//i.test(url) && URL.canParse(url)).map((one) => [one.url, one]));
  place.replaceChildren(
    ...[...pages.values()].map(({ title, url, license }) => {
      const page = make("li");
      const about = [new URL(url).hostname, license].filter(Boolean).join(", ");
      page.append(link(title || url, url), ` (${about})`);
      return page;
    }),
  );
}

function code(text) {
  const block = make("pre");
  block.textContent = text;
  block.tabIndex = 0;
  return block;
}

/* A button with a picture alone. */
function iconButton(symbol, label, action) {
  const button = make("button", "icon small");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${symbol}`);
  picture.append(use);
  button.append(picture);
  button.onclick = action;
  return button;
}

function makeTurn(shown, { copy: copyText, retry, edit, replay: play }) {
  const turn = make("article", "turn");
  const you = make("div", "said you");
  const server = make("div", "said server");
  const settled = make("span", "settled");
  const interim = make("span", "interim");
  const images = make("div", "images");
  const words = make("div", "words");
  const calls = make("div", "calls");
  const sources = make("ul", "sources");
  sources.setAttribute("aria-label", "Sources");
  const tools = make("div", "tools");
  const replay = iconButton("play", "Hear what was said", () => play(shown));
  tools.append(
    replay,
    iconButton("retry", "Ask again", () => retry(shown)),
    iconButton("edit", "Change the question", () => edit(shown)),
  );
  const copy = iconButton("copy", "Copy the answer", () => copyText(shown.answer.text));
  const foot = make("div", "foot");
  const note = make("p", "note");
  const line = make("p", "words");
  line.append(settled, interim);
  you.append(hiddenLabel("You: "), images, line);
  foot.append(note, copy);
  const dots = make("span", "dots");
  dots.setAttribute("aria-hidden", "true");
  dots.append(make("i"), make("i"), make("i"));
  server.append(hiddenLabel("Server: "), words, dots, calls, sources, foot);
  turn.append(you, tools, server);
  return { turn, you, server, settled, interim, images, words, calls, sources, note, tools, replay, copy };
}

function makeImage(url) {
  const image = make("img");
  image.src = url;
  image.alt = "a picture that was sent";
  return image;
}

function hiddenLabel(text) {
  const label = make("span", "for-readers");
  label.textContent = text;
  return label;
}

function make(tag, className = "") {
  const node = document.createElement(tag);
  node.className = className;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/* Words that no line breaks. */
function whole(text) {
  return text.replaceAll(" ", "\u00a0");
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(1)}\u00a0s`;
}
