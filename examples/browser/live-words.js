/* The words of the moment: what is being said and what is answered, in one column, with the word that sounds marked. A new
   turn takes the place of the one before. It needs nothing of the page: it fills the element that it is given, and is told
   everything by its methods. Its parts have the classes live-said, live-interim, live-answer and live-more. */

import { Follow } from "./follow.js";
import { showRichText } from "./rich-text.js";
import { markSpoken, markUnheard } from "../widget/spoken-word.js";

export class LiveWords {
  /* An element below the words, for whatever else belongs to them. */
  more;
  #host;
  #column;
  #said;
  #interim;
  #answer;
  #words = [];
  #turn = null;
  #follow;

  constructor(host) {
    this.#host = host;
    this.#said = make("span", "live-settled");
    this.#interim = make("span", "live-interim");
    this.#answer = make("div", "live-answer rich");
    this.more = make("div", "live-more");
    const line = make("p", "live-said");
    line.append(this.#said, this.#interim);
    this.#column = make("div", "live-column");
    this.#column.append(line, this.#answer, this.more);
    host.append(this.#column);
    this.#follow = new Follow(host);
  }

  /* `turn` is anything that tells one turn from another. `words` are those of the answer with their times; `cutMs` is what
     was heard of an answer that was cut short. */
  show(turn, { said = "", interim = "", answer = "", words = [], cutMs = null }) {
    if (turn !== this.#turn) {
      this.#turn = turn;
      this.speak(undefined);
      this.#follow.restart();
      this.#host.scrollTop = 0;
    }
    this.#words = words;
    setText(this.#said, said);
    setText(this.#interim, interim && said ? ` ${interim}` : interim);
    showRichText(this.#answer, answer);
    markUnheard(this.#answer, words, cutMs);
    this.#follow.look();
  }

  /* What sounds at `ms` of the answer is marked; nothing where `ms` is undefined. */
  speak(ms) {
    const range = markSpoken(this.#answer, this.#words, ms);
    this.#follow.speak(ms === undefined ? undefined : range);
  }
}

function make(tag, className) {
  const node = document.createElement(tag);
  node.className = className;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
