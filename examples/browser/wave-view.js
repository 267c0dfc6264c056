/* The last seconds of both voices: what is said stands above the line, what is answered below. */

const BAR_MS = 60;
const BAR = 3;
const GAP = 2;
const CALM_FRAME_MS = 250;

export class WaveView {
  #canvas;
  #bars = []; // { slot, you, server }
  #drawn = 0;
  #calm = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#draw(true)).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw(true));
    const loop = () => {
      this.#draw();
      requestAnimationFrame(loop);
    };
    requestAnimationFrame(loop);
  }

  /* `side` is "you" or "server"; `peak` from 0 to 1. */
  add(side, peak) {
    const slot = Math.floor(performance.now() / BAR_MS);
    let bar = this.#bars.at(-1);
    if (bar?.slot !== slot) {
      bar = { slot, you: 0, server: 0 };
      this.#bars.push(bar);
      if (this.#bars.length > 1000) this.#bars.splice(0, 500);
    }
    bar[side] = Math.max(bar[side], peak);
  }

  #draw(force = false) {
    const now = performance.now();
    if (!force && this.#calm.matches && now - this.#drawn < CALM_FRAME_MS) return;
    const slot = Math.floor(now / BAR_MS);
    const canvas = this.#canvas;
    const { clientWidth: width, clientHeight: height } = canvas;
    const shown = Math.ceil(width / (BAR + GAP));
    const quiet = (this.#bars.at(-1)?.slot ?? -1) < slot - shown - 2;
    if (!force && quiet && this.#drawn > 0 && this.quietDrawn) return;
    this.#drawn = now;
    this.quietDrawn = quiet;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const style = getComputedStyle(canvas);
    const colours = { you: style.getPropertyValue("--you"), server: style.getPropertyValue("--server") };
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const middle = height / 2;
    pen.fillStyle = style.getPropertyValue("--line");
    pen.fillRect(0, middle - 0.5, width, 1);
    const shift = this.#calm.matches ? 0 : ((now % BAR_MS) / BAR_MS) * (BAR + GAP);
    for (const bar of this.#bars) {
      const x = width - (slot - bar.slot) * (BAR + GAP) - shift;
      if (x < -BAR) continue;
      for (const side of ["you", "server"]) {
        const length = Math.min(1, Math.sqrt(bar[side])) * (middle - 2);
        if (length < 1) continue;
        pen.fillStyle = colours[side];
        pen.beginPath();
        pen.roundRect(x, side === "you" ? middle - length : middle, BAR, length, 1.5);
        pen.fill();
      }
    }
  }
}
