/* A list of which only what is in sight is in the page, however long it is. The height of an item is guessed until it has
   been in sight once. Items that have the focus stay. */

/* How far beyond the window items are there, in pixels. */
const BEYOND = 300;
/* How often items are measured until all that are in sight are there. */
const ROUNDS = 4;

export class LongList {
  #items = [];
  #heights = [];
  #tops = [0];
  #nodes = new Map(); // by place
  #sizes = new ResizeObserver(() => this.#measure() && this.draw());
  #widths = new ResizeObserver(() => this.draw());

  /* `render(item, place)` makes the element of an item; `guess` is its height in pixels. */
  constructor(scroller, list, { render, guess }) {
    Object.assign(this, { scroller, list, render, guess });
    scroller.classList.add("long-list");
    scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.#widths.observe(scroller);
  }

  get items() {
    return this.#items;
  }

  show(items) {
    this.#items = items;
    this.#heights = new Array(items.length).fill(this.guess);
    this.#nodes.clear();
    this.#sizes.disconnect();
    this.list.replaceChildren();
    this.scroller.scrollTop = 0;
    this.#sum();
    this.draw();
  }

  /* The element of an item, or null while it is not in sight. */
  node(place) {
    return this.#nodes.get(place) ?? null;
  }

  get places() {
    return this.#nodes.keys();
  }

  /* Whether all of an item, or as much of it as fits, is in the window. */
  isSeen(place) {
    const { scrollTop, clientHeight } = this.scroller;
    return this.#tops[place] >= scrollTop - 1 && Math.min(this.#tops[place + 1], this.#tops[place] + clientHeight) <= scrollTop + clientHeight + 1;
  }

  reveal(place) {
    if (place < 0 || place >= this.#items.length) return;
    // What is guessed of items around it becomes known on the way.
    for (let round = 0; round < ROUNDS; round++) {
      this.scroller.scrollTop = this.#tops[place] - this.scroller.clientHeight / 5;
      this.draw();
    }
  }

  draw() {
    for (let round = 0; round < ROUNDS; round++) {
      const { scrollTop, clientHeight } = this.scroller;
      const first = this.#at(scrollTop - BEYOND);
      const last = Math.min(this.#items.length - 1, this.#at(scrollTop + clientHeight + BEYOND));
      for (const [place, node] of this.#nodes) {
        if ((place >= first && place <= last) || node.contains(document.activeElement)) continue;
        this.#sizes.unobserve(node);
        node.remove();
        this.#nodes.delete(place);
      }
      let added = false;
      for (let place = first; place <= last; place++) added = this.#add(place) || added;
      if (!this.#measure() && !added) return;
    }
  }

  #add(place) {
    if (this.#nodes.has(place)) return false;
    const node = this.render(this.#items[place], place);
    node.setAttribute("aria-setsize", this.#items.length);
    node.setAttribute("aria-posinset", place + 1);
    node.dataset.place = place;
    node.style.top = `${this.#tops[place]}px`;
    const next = [...this.list.children].find((one) => Number(one.dataset.place) > place);
    this.list.insertBefore(node, next ?? null);
    this.#nodes.set(place, node);
    this.#sizes.observe(node);
    return true;
  }

  /* Take over the heights of what is there. What is in sight stays where it is. Returns whether any was another one. */
  #measure() {
    const { scroller } = this;
    const anchor = this.#at(scroller.scrollTop);
    const offset = scroller.scrollTop - this.#tops[anchor];
    let changed = false;
    for (const [place, node] of this.#nodes) {
      const height = node.offsetHeight;
      if (height === 0 || height === this.#heights[place]) continue; // 0: the list is not shown
      this.#heights[place] = height;
      changed = true;
    }
    if (!changed) return false;
    this.#sum();
    for (const [place, node] of this.#nodes) node.style.top = `${this.#tops[place]}px`;
    const top = this.#tops[anchor] + offset;
    if (Math.abs(top - scroller.scrollTop) >= 1) scroller.scrollTop = top;
    return true;
  }

  #sum() {
    let top = 0;
    this.#tops = [0, ...this.#heights.map((height) => (top += height))];
    this.list.style.height = `${top}px`;
  }

  /* The item at a height. */
  #at(top) {
    let [low, high] = [0, Math.max(0, this.#items.length - 1)];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.#tops[middle] <= top) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}
