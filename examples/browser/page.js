/* Small things that every part of the page needs: its elements, its messages, its voice for screen readers. */

export const element = (id) => document.getElementById(id);

/* Messages above the conversation, each under a name: a new one of the same name takes the place of the old. */
export class Messages {
  #shown = new Map();

  constructor(place) {
    this.place = place;
  }

  /* `kind` is bad, busy or plain; `label` and `action` make a button; `seconds` lets it go by itself. */
  show(name, text, { kind = "bad", label = "", action = null, seconds = 0 } = {}) {
    let shown = this.#shown.get(name);
    if (!shown) {
      shown = { box: make("div", "message"), words: make("p") };
      shown.box.append(shown.words);
      this.#shown.set(name, shown);
      this.place.append(shown.box);
    }
    clearTimeout(shown.timer);
    shown.box.dataset.kind = kind;
    shown.box.dataset.name = name;
    if (shown.words.textContent !== text) shown.words.textContent = text;
    shown.box.querySelectorAll("button").forEach((button) => button.remove());
    if (action) shown.box.append(makeButton(label, action));
    else shown.box.append(makeButton("×", () => this.hide(name), "Dismiss"));
    if (seconds) shown.timer = setTimeout(() => this.hide(name), seconds * 1000);
  }

  hide(name) {
    this.#shown.get(name)?.box.remove();
    this.#shown.delete(name);
  }
}

/* Says something to screen readers alone. */
export function announce(text) {
  const place = element("announcement");
  place.textContent = place.textContent === text ? `${text} ` : text;
}

function make(tag, className = "") {
  const node = document.createElement(tag);
  node.className = className;
  return node;
}

function makeButton(label, action, name = "") {
  const button = make("button", "quiet");
  button.type = "button";
  button.textContent = label;
  if (name) button.setAttribute("aria-label", name);
  button.onclick = action;
  return button;
}
