/* How loud both sides were in the last seconds: the person above the line, the server below it. Drawn only while it is seen. */

const BUCKET_MS = 100;
const BUCKETS = 200;

export class Levels {
  #canvas;
  #peaks = { you: new Float32Array(BUCKETS), server: new Float32Array(BUCKETS) };
  #newest = 0; // the number of the bucket of the moment, since the page was opened
  #timer;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  /* `side` is "you" or "server"; `peak` from 0 to 1. */
  add(side, peak) {
    this.#move();
    const place = this.#newest % BUCKETS;
    this.#peaks[side][place] = Math.max(this.#peaks[side][place], Math.min(1, Math.sqrt(peak)));
  }

  show(seen) {
    clearInterval(this.#timer);
    if (!seen) return;
    this.#draw();
    this.#timer = setInterval(() => this.#draw(), BUCKET_MS);
  }

  #move() {
    const now = Math.floor(performance.now() / BUCKET_MS);
    for (let bucket = Math.max(this.#newest + 1, now - BUCKETS + 1); bucket <= now; bucket++) {
      for (const peaks of Object.values(this.#peaks)) peaks[bucket % BUCKETS] = 0;
    }
    this.#newest = now;
  }

  #draw() {
    this.#move();
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (document.hidden || width === 0) return;
    const scale = Math.min(2, devicePixelRatio || 1);
    this.#canvas.width = Math.round(width * scale); // which also clears it
    this.#canvas.height = Math.round(height * scale);
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(this.#canvas);
    const [middle, step] = [height / 2, width / BUCKETS];
    pen.fillStyle = style.getPropertyValue("--line");
    pen.fillRect(0, middle - 0.5, width, 1);
    for (const [side, upwards] of [["you", true], ["server", false]]) {
      pen.fillStyle = style.getPropertyValue(`--${side}`);
      for (let place = 0; place < BUCKETS; place++) {
        const tall = this.#peaks[side][(this.#newest + 1 + place) % BUCKETS] * (middle - 1);
        if (tall > 0.5) pen.fillRect(place * step, upwards ? middle - tall : middle, Math.max(1, step - 0.5), tall);
      }
    }
  }
}
