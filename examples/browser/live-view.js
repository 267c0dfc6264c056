/* The column below the orb: the words of the turn of the moment, and what else must be seen of it while the log is closed:
   pictures, tools, sources, and what went wrong. */

import { makeImage, showCalls, showSources, troubleOf, wentUnheard, withoutWords } from "./conversation-view.js";
import { LiveWords } from "./live-words.js";

export class LiveView {
  /* Whether there is more than the words: not where the log shows it. */
  whole = true;
  /* Whether the server says which words were said to it. */
  transcripts = true;
  #conversation;
  #words;
  #shown = null;
  #parts = { images: make("div", "images"), calls: make("div"), trouble: make("p", "note wrong"), sources: make("ul", "sources") };

  constructor(host, conversation) {
    this.#conversation = conversation;
    this.#words = new LiveWords(host);
    this.#parts.sources.setAttribute("aria-label", "Sources");
  }

  /* Something of the conversation changed. */
  show() {
    const turns = this.#conversation.turns.filter((turn) => !turn.dropped && !wentUnheard(turn));
    // What begins takes the place of what was before with its first word.
    const turn = turns.findLast((one) => one.user.text || one.user.interim || one.user.done) ?? turns.at(-1);
    this.#shown = turn ?? null;
    if (!turn) return this.#words.show(null, {});
    const asked = turn.kind === "tool" ? (turns.findLast(({ kind, number }) => number < turn.number && kind !== "tool") ?? turn) : turn;
    const { user, answer } = turn;
    const wordless = turn === asked && turn.kind !== "greeting" && !user.text && !user.interim && !user.images.length;
    this.#words.show(asked, {
      said: asked.user.text,
      interim: user.interim || (wordless && answer.state !== "stopped" ? withoutWords(user, answer, this.transcripts) : ""),
      answer: answer.text,
      words: answer.words,
      cutMs: answer.state === "stopped" ? turn.heardMs : null,
    });
    if (!this.whole) return this.#words.more.replaceChildren();
    const { images, calls, trouble, sources } = this.#parts;
    if (!this.#words.more.firstChild) this.#words.more.append(images, calls, trouble, sources);
    const pictures = asked.user.images;
    if ([...images.children].map(({ src }) => src).join() !== pictures.join()) images.replaceChildren(...pictures.map(makeImage));
    showCalls(calls, [...(asked === turn ? [] : asked.answer.calls), ...answer.calls]);
    showSources(sources, answer.annotations);
    const wrong = troubleOf(answer);
    if (trouble.textContent !== wrong) trouble.textContent = wrong;
  }

  /* Mark the word that sounds at `ms` of a turn's answer; without a turn, none. */
  speak(turn, ms) {
    this.#words.speak(turn && turn === this.#shown ? ms : undefined);
  }
}

function make(tag, className = "") {
  const node = document.createElement(tag);
  node.className = className;
  return node;
}
