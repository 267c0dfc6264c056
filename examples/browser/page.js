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
      shown = { box: make("div", "message"), words: make("p"), button: make("button", "quiet") };
      shown.button.type = "button";
      shown.box.append(shown.words, shown.button);
      this.#shown.set(name, shown);
      this.place.append(shown.box);
    }
    clearTimeout(shown.timer);
    shown.box.dataset.kind = kind;
    shown.box.dataset.name = name;
    if (shown.words.textContent !== text) shown.words.textContent = text;
    // The button stays the same one: it may be under a finger.
    const { button } = shown;
    const [face, spoken] = action ? [label, ""] : ["×", "Dismiss"];
    if (button.textContent !== face) button.textContent = face;
    if (spoken) button.setAttribute("aria-label", spoken);
    else button.removeAttribute("aria-label");
    button.onclick = action ?? (() => this.hide(name));
    if (seconds) shown.timer = setTimeout(() => this.hide(name), seconds * 1000);
  }

  hide(name) {
    clearTimeout(this.#shown.get(name)?.timer); // it is not for the next message of this name
    this.#shown.get(name)?.box.remove();
    this.#shown.delete(name);
  }
}

/* Open a dialog by one button; another one, Escape, and a click beside it close it. `opened` is called after the first. */
export function bindDialog(dialog, { opener, closer, opened = () => {} }) {
  opener.onclick = () => {
    dialog.showModal();
    opened();
  };
  closer.onclick = () => dialog.close();
  dialog.addEventListener("click", ({ target, clientX: x, clientY: y }) => {
    const { left, right, top, bottom } = dialog.getBoundingClientRect();
    if (target === dialog && (x < left || x > right || y < top || y > bottom)) dialog.close();
  });
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
