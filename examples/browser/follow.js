/* Keeps the newest line of what grows in sight, or the word that sounds where that stands higher, only while the reader is
   there: what somebody reads stays where it is. */

const NEAR_END = 80;
/* Where the line that sounds stands in the view: so much of its height from the top. */
const SPOKEN_AT = 0.4;

export class Follow {
  #box;
  #following = true;
  #placed = 0; // where the view was put by this page, and by no reader
  #spoken = null; // the range of the word that sounds

  /* `box` is the element that scrolls. */
  constructor(box) {
    this.#box = box;
    box.addEventListener("scroll", () => {
      if (Math.abs(box.scrollTop - this.#placed) > 1) this.#following = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    });
    // A message above it, the keyboard of a phone, and turning the phone take room from it.
    new ResizeObserver(() => this.look()).observe(box);
  }

  /* Follow again, wherever the reader was. */
  restart() {
    this.#following = true;
    this.#spoken = null;
  }

  /* `range` is the word that sounds; null between two words, where the view stays; undefined where none sounds any more. */
  speak(range) {
    if (range !== null) this.#spoken = range ?? null;
    if (range) this.look();
  }

  look() {
    const box = this.#box;
    if (!this.#following || box.clientHeight === 0) return;
    const end = box.scrollHeight - box.clientHeight;
    const line = this.#spoken?.getBoundingClientRect();
    if (line?.height === 0) return; // its text was just written anew; the next word is near
    const top = line ? line.top - box.getBoundingClientRect().top + box.scrollTop : Infinity;
    const wanted = Math.max(0, Math.min(end, top - SPOKEN_AT * box.clientHeight));
    if (Math.abs(box.scrollTop - wanted) > 1) box.scrollTop = wanted;
    this.#placed = box.scrollTop;
  }
}
