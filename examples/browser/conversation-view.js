/* The log: every turn of the conversation. It shows what was said and what was answered; what else is known of a turn, and
   what can be done with it, is seen while the turn is pointed at or has the focus. Only what changed is touched. */

import { Follow } from "./follow.js";
import { duration } from "./calls/shown.js";
import { ofAnswer } from "./plain-words.js";
import { link, showRichText } from "./rich-text.js";
import { markSpoken, markUnheard } from "../widget/spoken-word.js";

export class ConversationView {
  #log;
  #nodes = new Map();
  #follow;
  #speaking = null; // the element with the answer that sounds
  #actions;
  /* Whether the server says which words were said to it. */
  transcripts = true;

  /* `actions` are copy(text), retry(turn), edit(turn) and replay(turn, side), of which `side` is "user" or "server". */
  constructor(log, actions) {
    this.#log = log;
    this.#actions = actions;
    this.#follow = new Follow(log);
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
    this.#showUser(nodes, turn);
    this.#showAnswer(nodes, turn);
    this.#follow.look();
  }

  /* Mark the word that sounds at `ms` of a turn's answer; without a turn, none. */
  speak(turn, ms) {
    const words = (turn && this.#nodes.get(turn.number)?.words) ?? null;
    if (this.#speaking && this.#speaking !== words) markSpoken(this.#speaking, []);
    this.#speaking = words;
    this.#follow.speak(words ? markSpoken(words, turn.answer.words, ms) : undefined);
  }

  #showUser({ you, settled, interim, images, tools, replay }, { kind, user, answer, sound }) {
    you.hidden = kind === "greeting" || kind === "tool";
    setText(settled, user.text);
    const rest = user.interim ? (user.text ? " " : "") + user.interim : "";
    const wordless = !user.text && !rest && !user.images.length;
    setText(interim, rest || (wordless ? withoutWords(user, answer, this.transcripts) : ""));
    you.classList.toggle("open", !user.done);
    you.classList.toggle("wordless", wordless && user.done);
    tools.hidden = !user.done || !user.text;
    replay.hidden = sound.user.length === 0;
    if (images.childElementCount !== user.images.length) images.replaceChildren(...user.images.map(makeImage));
  }

  #showAnswer({ server, words, calls, sources, note, copy, again }, turn) {
    const { answer } = turn;
    server.hidden = answer.state === "none";
    server.dataset.state = answer.state;
    showRichText(words, answer.text);
    markUnheard(words, answer.words, answer.state === "stopped" ? turn.heardMs : null);
    const complete = ["done", "stopped"].includes(answer.state);
    copy.hidden = !answer.text || !complete;
    again.hidden = turn.sound.server.length === 0 || !complete;
    showCalls(calls, answer.calls);
    showSources(sources, answer.annotations);
    const said = [];
    if (turn.firstSoundMs !== null) said.push(whole(`first sound after ${duration(turn.firstSoundMs)}`));
    if (answer.state === "stopped") said.push(turn.heardMs ? whole(`stopped after ${seconds(turn.heardMs)}`) : "stopped");
    const used = answer.calls.map(({ name }) => name).join(", ");
    if (used) said.push(`used ${used}`);
    else if (answer.state === "done" && !answer.text) said.push(turn.sound.server.length ? "sound without words" : "no answer");
    if (answer.finishReason === "length") said.push("cut off at the length limit");
    const wrong = troubleOf(answer);
    if (wrong) said.push(wrong);
    note.classList.toggle("wrong", wrong !== "");
    setText(note, said.join(" · "));
  }
}

/* A cough during an answer, which went on. */
export function wentUnheard({ interrupts, user, answer }) {
  return interrupts && answer.state === "done" && !user.text && !user.images.length && !answer.text && !answer.calls.length;
}

/* What went wrong with an answer; "" where nothing did. */
export function troubleOf({ error, reason, state }) {
  if (error) return ofAnswer(error, reason);
  return state === "failed" ? "no answer came" : "";
}

/* What stands for words that did not come. Of a turn that was stopped nobody knows whether there were any. */
export function withoutWords(user, answer, transcripts) {
  if (!user.done || answer.state === "thinking") return "…";
  return answer.state === "stopped" || !transcripts ? "(not transcribed)" : "(nothing was heard)";
}

/* Each call of a tool as a card: what was asked, and what came of it. */
export function showCalls(place, calls) {
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
export function showSources(place, annotations) {
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
  turn.tabIndex = -1; // a finger gives it the focus, which a mouse need not
  const you = make("div", "said you");
  const server = make("div", "said server");
  const settled = make("span", "settled");
  const interim = make("span", "interim");
  const images = make("div", "images");
  const words = make("div", "words rich");
  const calls = make("div", "calls");
  const sources = make("ul", "sources");
  sources.setAttribute("aria-label", "Sources");
  const tools = make("div", "tools");
  const replay = iconButton("play", "Hear what was said", () => play(shown, "user"));
  tools.append(
    replay,
    iconButton("retry", "Ask again", () => retry(shown)),
    iconButton("edit", "Change the question", () => edit(shown)),
  );
  const copy = iconButton("copy", "Copy the answer", () => copyText(shown.answer.text));
  const again = iconButton("play", "Hear the answer", () => play(shown, "server"));
  const foot = make("div", "foot");
  const note = make("p", "note");
  const line = make("p", "words");
  line.append(settled, interim);
  you.append(hiddenLabel("You: "), images, line);
  foot.append(note, again, copy);
  const dots = make("span", "dots");
  dots.setAttribute("aria-hidden", "true");
  dots.append(make("i"), make("i"), make("i"));
  server.append(hiddenLabel("Server: "), words, dots, calls, sources, foot);
  turn.append(you, tools, server);
  return { turn, you, server, settled, interim, images, words, calls, sources, note, tools, replay, again, copy };
}

export function makeImage(url) {
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
