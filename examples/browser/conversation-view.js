/* The conversation on the page. Only what changed is touched, and what is read stays where it is: the view follows the
   newest line only while the reader is at the end. */

import { duration, ofAnswer } from "./plain-words.js";

const NEAR_END = 80;

export class ConversationView {
  #log;
  #welcome;
  #nodes = new Map();
  #following = true;

  constructor(log, welcome) {
    this.#log = log;
    this.#welcome = welcome;
    log.addEventListener("scroll", () => {
      this.#following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    });
    // A message above it, the keyboard of a phone, and turning the phone take room from it.
    new ResizeObserver(() => this.#follow()).observe(log);
  }

  show(turn) {
    this.#welcome.hidden = true;
    let nodes = this.#nodes.get(turn.number);
    if (!nodes) {
      nodes = makeTurn();
      this.#nodes.set(turn.number, nodes);
      this.#log.append(nodes.turn);
    }
    nodes.turn.hidden = wentUnheard(turn);
    this.#showUser(nodes, turn);
    this.#showAnswer(nodes, turn);
    this.#follow();
  }

  #follow() {
    if (this.#following) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #showUser({ you, settled, interim, images }, { kind, user, answer }) {
    you.hidden = kind === "greeting" || kind === "tool";
    setText(settled, user.text);
    const rest = user.interim ? (user.text ? " " : "") + user.interim : "";
    const wordless = !user.text && !rest && !user.images.length;
    setText(interim, rest || (wordless ? withoutWords(user, answer) : ""));
    you.classList.toggle("open", !user.done);
    if (images.childElementCount !== user.images.length) images.replaceChildren(...user.images.map(makeImage));
  }

  #showAnswer({ server, words, note }, turn) {
    const { answer } = turn;
    server.hidden = answer.state === "none";
    server.dataset.state = answer.state;
    setText(words, answer.text);
    const said = [];
    if (turn.firstSoundMs !== null) said.push(`first sound after ${duration(turn.firstSoundMs)}`);
    if (answer.state === "stopped") said.push(turn.heardMs ? `stopped after ${seconds(turn.heardMs)}` : "stopped");
    const tools = answer.calls.map(({ name }) => name).join(", ");
    if (tools) said.push(`used ${tools}`);
    else if (answer.state === "done" && !answer.text) said.push(turn.sound.server.length ? "sound without words" : "no answer");
    if (answer.finishReason === "length") said.push("cut off at the length limit");
    if (answer.error) said.push(ofAnswer(answer.error));
    else if (answer.state === "failed") said.push("no answer came");
    setText(note, said.join(" · "));
  }
}

/* A cough during an answer, which went on. */
function wentUnheard({ interrupts, user, answer }) {
  return interrupts && answer.state === "done" && !user.text && !user.images.length && !answer.text && !answer.calls.length;
}

/* What stands for words that did not come. Of a turn that was stopped nobody knows whether there were any. */
function withoutWords(user, answer) {
  if (!user.done || answer.state === "thinking") return "…";
  return answer.state === "stopped" ? "(not transcribed)" : "(nothing was heard)";
}

function makeTurn() {
  const turn = make("article", "turn");
  const you = make("div", "said you");
  const server = make("div", "said server");
  const settled = make("span", "settled");
  const interim = make("span", "interim");
  const images = make("div", "images");
  const words = make("p", "words");
  const note = make("p", "note");
  const line = make("p", "words");
  line.append(settled, interim);
  you.append(hiddenLabel("You: "), images, line);
  const dots = make("span", "dots");
  dots.setAttribute("aria-hidden", "true");
  dots.append(make("i"), make("i"), make("i"));
  server.append(hiddenLabel("Server: "), words, dots, note);
  turn.append(you, server);
  return { turn, you, server, settled, interim, images, words, note };
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

function seconds(ms) {
  return `${(ms / 1000).toFixed(1)}\u00a0s`;
}
