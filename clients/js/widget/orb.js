/* The centre of the page: one body with a light within, whose edge has the spectrum of the voice that sounds, and around it
   signs of what goes on, which need no colour:

   away       a broken ring, no body      listening  a thin ring around it, a slow swell
   ready      small, asleep, still        hearing    its edge follows the voice, and rings draw in
   opening    a ring that is not closed   speaking   its edge follows the voice, and waves go out to both sides
   busy       small, with arcs around it  ducked     smaller and paler than speaking, with dotted waves
   muted      struck through, still       interrupted (for a moment)  the ring breaks and flies apart

   It needs nothing of the page: it fills the element that it is given, takes its colours from that element's custom
   properties (COLOURS), and is told everything by its methods. A graphics card draws the body (orb-body.js), where there is
   one. Where less motion is wanted, each state is a picture that stands still. What stands still is drawn once: a page that
   waits for hours should cost nothing, least of all where no graphics card draws it. */

import { DrawnBody, LitBody } from "./orb-body.js";
import { BANDS } from "./spectrum.js";

const BREAK_MS = 550;
const STILL_BREAK_MS = 1200;
const RING_MS = 1500;
const RING_EVERY_MS = 420;
/* Between two pictures: of a slow swell, whose edge goes a third of a pixel meanwhile, and of anything where no graphics
   card draws. A timer waits for them, a little less long: who asks for each frame of the screen pays for each. */
const SLOW_FRAME_MS = 250;
const DRAWN_FRAME_MS = 30;
const EARLY_MS = 4;
/* The orb rests below this level of sound. */
const QUIET = 0.06;
const STILL = new Set(["away", "muted", "ready"]);
const RECENT_FRAMES = 60;
const TURN = Math.PI * 2;

/* What a state looks like: size, how much of the server's colour and of that of work, how much colour at all, the swell of
   the edge, how strong the light is. */
const LOOKS = {
  away: { size: 0.66, server: 0, work: 0, colour: 0, swell: 0, light: 0 },
  ready: { size: 0.78, server: 0.5, work: 0, colour: 0.8, swell: 0.007, light: 0.7 },
  opening: { size: 0.7, server: 0.2, work: 0, colour: 0.8, swell: 0.014, light: 0.7 },
  listening: { size: 0.86, server: 0, work: 0, colour: 1, swell: 0.02, light: 0.85 },
  hearing: { size: 0.92, server: 0, work: 0, colour: 1, swell: 0.03, light: 1 },
  busy: { size: 0.68, server: 0, work: 1, colour: 1, swell: 0.03, light: 0.9 },
  speaking: { size: 0.94, server: 1, work: 0, colour: 1, swell: 0.03, light: 1 },
  ducked: { size: 0.76, server: 1, work: 0, colour: 0.6, swell: 0.03, light: 0.5 },
  muted: { size: 0.74, server: 0, work: 0, colour: 0.2, swell: 0, light: 0.15 },
};

/* The custom property of each colour, and what stands for it where that is not set: #rgb or #rrggbb. */
const COLOURS = {
  you: ["--orb-you", "#1a9cb4"],
  server: ["--orb-server", "#5d5fe0"],
  work: ["--orb-work", "#3f86dd"],
  rest: ["--orb-rest", "#a3b4c8"],
  light: ["--orb-light", "#ffffff"],
  deep: ["--orb-deep", "#101d5c"],
  paper: ["--paper", "#ffffff"],
  bad: ["--bad", "#b3261e"],
};

export class Orb {
  /* Milliseconds of script that each of the last frames took, and how many were drawn. */
  cost = { recent: [], frames: 0 };
  #host;
  #canvas = made();
  #pen = this.#canvas.getContext("2d");
  #body;
  #state = "away";
  #now = { ...LOOKS.away };
  #levels = { you: 0, server: 0 };
  #wanted = { you: 0, server: 0 };
  #heard = { you: new Float32Array(BANDS), server: new Float32Array(BANDS) };
  #bands = new Float32Array(BANDS);
  #rings = []; // performance.now() of when each was born
  #brokenAt = -Infinity;
  #breaking = false;
  #drawnAt = 0;
  #phase = 0;
  #stale = true;
  #asked = false; // for the next frame
  #slow = false;
  #timer;
  #colours = null;
  #calm = matchMedia("(prefers-reduced-motion: reduce)");

  /* `host` is an element with a size; `webgl` is false for one that is drawn by the processor in any case. */
  constructor(host, { webgl = true } = {}) {
    this.#host = host;
    this.#body = (webgl && LitBody.made(() => this.#fallBack())) || new DrawnBody();
    if (getComputedStyle(host).position === "static") host.style.position = "relative";
    host.append(...(this.#body.canvas ? [this.#body.canvas] : []), this.#canvas);
    host.orb = this;
    new ResizeObserver(() => {
      this.repaint();
      this.#frame(performance.now()); // at once: until then the browser stretches the picture of the old size
    }).observe(host);
    this.#change();
  }

  /* Follow what the page and its reader choose, until `signal` says that the orb is gone: the page keeps it until then. */
  watch(signal) {
    addEventListener("themechange", () => this.repaint(), { signal });
    for (const choice of [matchMedia("(prefers-color-scheme: dark)"), this.#calm]) {
      choice.addEventListener("change", () => this.repaint(), { signal });
    }
    this.repaint();
  }

  /* `state` is one of LOOKS. */
  show(state) {
    if (state === this.#state) return;
    this.#state = state;
    this.#rings = [];
    this.#change();
  }

  /* An answer was cut short. */
  interrupt() {
    this.#brokenAt = performance.now();
    this.#change();
  }

  /* `side` is "you" or "server"; `peak` from 0 to 1; `bands` as spectrum.js has them, if the sound is at hand. */
  add(side, peak, bands = null) {
    this.#wanted[side] = Math.max(this.#wanted[side], Math.min(1, Math.sqrt(peak)));
    if (bands) this.#heard[side].set(bands);
    else this.#heard[side].fill(this.#wanted[side] * 0.8);
    if (this.#slow && this.#wanted[side] >= QUIET) this.#ask();
  }

  /* The colours may be other ones. */
  repaint() {
    this.#colours = null;
    this.#change();
  }

  /* The graphics card is gone. */
  #fallBack() {
    this.#body.canvas.remove();
    this.#body = new DrawnBody();
    this.#change();
  }

  /* Something is to be drawn anew. */
  #change() {
    this.#stale = true;
    this.#ask();
  }

  /* Look at the next frame of the screen whether to draw, and after that as often as something moves. */
  #ask() {
    if (this.#asked) return;
    this.#asked = true;
    clearTimeout(this.#timer);
    requestAnimationFrame((now) => {
      this.#asked = false;
      const wait = this.#frame(now);
      if (wait > EARLY_MS) this.#timer = setTimeout(() => this.#ask(), wait - EARLY_MS);
      else if (wait !== null) this.#ask();
    });
  }

  /* Draw, if it is time. Returns in how many milliseconds it is again; null where nothing moves. */
  #frame(now) {
    const since = now - this.#drawnAt;
    const calm = this.#calm.matches;
    const rests = STILL.has(this.#state) || calm;
    const breaking = now - this.#brokenAt < (calm ? STILL_BREAK_MS : BREAK_MS);
    if (breaking !== this.#breaking) this.#stale = true; // also to draw the body whole again
    this.#breaking = breaking;
    const moves = breaking && !calm;
    this.#slow = this.#state === "listening" && Math.max(this.#level, this.#wanted.you) < QUIET && this.#settled;
    const interval = this.#slow ? SLOW_FRAME_MS : this.#body.canvas ? 0 : DRAWN_FRAME_MS;
    if (!this.#stale && !moves) {
      if (rests && this.#settled) return breaking ? 0 : null;
      if (!rests && since < interval - EARLY_MS) return interval - since;
    }
    const begun = performance.now();
    this.#stale = false;
    this.#move(Math.min(0.1, since / 1000), now);
    this.#drawnAt = now;
    this.#draw(now);
    this.cost.frames += 1;
    this.cost.recent.push(performance.now() - begun);
    if (this.cost.recent.length > RECENT_FRAMES) this.cost.recent.shift();
    return interval;
  }

  get #settled() {
    const look = LOOKS[this.#state];
    return Object.keys(look).every((name) => Math.abs(look[name] - this.#now[name]) < 0.004);
  }

  #move(seconds, now) {
    const calm = this.#calm.matches;
    const follow = (rate) => (calm ? 1 : 1 - Math.exp(-rate * seconds));
    for (const [name, value] of Object.entries(LOOKS[this.#state])) this.#now[name] += (value - this.#now[name]) * follow(9);
    for (const side of ["you", "server"]) {
      const wanted = calm ? 0 : this.#wanted[side];
      this.#levels[side] += (wanted - this.#levels[side]) * follow(wanted > this.#levels[side] ? 28 : 8);
      this.#wanted[side] *= Math.exp(-seconds * 9);
      for (let band = 0; band < BANDS; band++) this.#heard[side][band] *= Math.exp(-seconds * 6);
    }
    const side = this.#side;
    for (let band = 0; band < BANDS; band++) {
      const wanted = calm || side === null ? 0 : this.#heard[side][band];
      this.#bands[band] += (wanted - this.#bands[band]) * follow(wanted > this.#bands[band] ? 24 : 9);
    }
    if (!calm) this.#phase += seconds * (this.#state === "busy" ? 2.6 : 0.8 + 2.2 * this.#level);
    const rings = this.#state === "hearing" || this.#state === "speaking";
    const last = this.#rings.at(-1) ?? -Infinity;
    if (rings && !calm && this.#level > 0.12 && now - last > RING_EVERY_MS) this.#rings.push(now);
    while (this.#rings.length && now - this.#rings[0] > RING_MS) this.#rings.shift();
  }

  /* Whose voice moves it. */
  get #side() {
    if (this.#state === "speaking") return "server";
    if (this.#state === "ducked") return this.#levels.you > this.#levels.server ? "you" : "server";
    return this.#state === "hearing" || this.#state === "listening" ? "you" : null;
  }

  get #level() {
    return this.#side === null ? 0 : this.#levels[this.#side];
  }

  #draw(now) {
    const { clientWidth: width, clientHeight: height } = this.#host;
    if (width === 0 || height === 0) return;
    const side = Math.min(width, height); // what is beside the square stays empty, and costs nothing
    const scale = Math.min(this.#body.canvas ? 2 : 1.5, devicePixelRatio || 1);
    for (const canvas of [this.#body.canvas, this.#canvas]) if (canvas) fit(canvas, { side, scale, width, height });
    this.#colours ??= this.#readColours();
    const pen = this.#pen;
    pen.setTransform(scale, 0, 0, scale, (side / 2) * scale, (side / 2) * scale);
    pen.clearRect(-side / 2, -side / 2, side, side);
    const unit = side * 0.36;
    const radius = unit * this.#now.size * (1 + 0.1 * this.#level);
    const ink = this.#mixed();
    const { light, deep } = this.#colours;
    const hollow = this.#state === "away";
    const { swell, light: strength, colour } = this.#now;
    this.#body.draw(pen, { side, radius, ink, light, deep, swell, strength, colour, hollow, level: this.#level, bands: this.#bands, phase: this.#phase });
    this.#signs(unit, radius, { ink, now });
    if (!this.#breaking) return;
    const broken = this.#calm.matches ? 0.4 : (now - this.#brokenAt) / BREAK_MS;
    this.#brokenRing(radius * (1.1 + 0.3 * broken), { ink: this.#colours.server, age: broken, width: 3 });
  }

  #signs(unit, radius, { ink, now }) {
    const still = this.#calm.matches;
    const far = unit * 1.36;
    switch (this.#state) {
      case "away":
        return this.#brokenRing(radius, { ink, age: 0, width: 1.5 });
      case "opening":
        return this.#arc(radius * 1.22, { ink, alpha: 0.75, width: 2.5, from: -TURN / 4 + this.#phase * 1.6, length: TURN * 0.72 });
      case "listening":
        return this.#arc(radius * 1.2, { ink, alpha: 0.4, width: 1.5 });
      case "busy":
        return this.#arcs(radius, ink);
      case "hearing":
        if (still) for (const [size, alpha] of [[1.26, 0.7], [1.44, 0.4]]) this.#arc(radius * size, { ink, alpha, width: radius * 0.03 });
        for (const born of this.#rings) {
          const age = (now - born) / RING_MS;
          this.#arc(far - (far - radius) * age, { ink, alpha: 0.5 * Math.sin(age * Math.PI), width: 1 + 1.5 * age });
        }
        return;
      case "speaking":
        if (still) for (const [size, alpha] of [[1.26, 0.8], [1.44, 0.45]]) this.#waves(radius * size, { ink, alpha, width: radius * 0.035 });
        for (const born of this.#rings) {
          const age = (now - born) / RING_MS;
          this.#waves(radius + (far - radius) * age, { ink, alpha: 0.6 * (1 - age), width: 1 + 2 * (1 - age) });
        }
        return;
      case "ducked":
        this.#pen.setLineDash([1, 7]);
        this.#waves(radius * 1.3, { ink, alpha: 0.9, width: 3 });
        return this.#pen.setLineDash([]);
      case "muted":
        return this.#strike(radius);
    }
  }

  /* To the left and to the right of the body. */
  #waves(radius, { ink, alpha, width }) {
    for (const middle of [0, TURN / 2]) this.#arc(radius, { ink, alpha, width, from: middle - 0.6, length: 1.2 });
  }

  #arc(radius, { ink, alpha, width, from = 0, length = TURN }) {
    this.#stroke(rgb(ink, alpha), Math.max(1.5, width));
    this.#pen.beginPath();
    this.#pen.arc(0, 0, radius, from, from + length);
    this.#pen.stroke();
  }

  #arcs(radius, ink) {
    for (const [place, length, size] of [[0, 1.5, 1.3], [TURN / 2, 1.5, 1.3], [TURN / 3, 0.8, 1.48], [-TURN / 6, 0.8, 1.48]]) {
      const from = place + this.#phase * (size > 1.4 ? -0.8 : 1);
      this.#arc(radius * size, { ink, alpha: size > 1.4 ? 0.4 : 0.75, width: radius * 0.04, from, length });
    }
  }

  #strike(radius) {
    for (const [colour, width] of [[this.#colours.paper, radius * 0.26], [this.#colours.bad, radius * 0.09]]) {
      this.#stroke(rgb(colour), width);
      this.#pen.beginPath();
      this.#pen.moveTo(-radius * 0.8, -radius * 0.8);
      this.#pen.lineTo(radius * 0.8, radius * 0.8);
      this.#pen.stroke();
    }
  }

  #brokenRing(radius, { ink, age, width }) {
    const pieces = 9;
    for (let piece = 0; piece < pieces; piece++) {
      const from = (piece / pieces) * TURN + age;
      this.#arc(radius, { ink, alpha: 0.9 * (1 - age), width: width + radius * 0.02, from, length: (TURN / pieces) * 0.6 });
    }
  }

  #stroke(style, width) {
    this.#pen.strokeStyle = style;
    this.#pen.lineWidth = width;
    this.#pen.lineCap = "round";
  }

  #mixed() {
    const { you, server, work, rest } = this.#colours;
    const { server: theirs, work: busy, colour } = this.#now;
    return blend(rest, blend(blend(you, server, theirs), work, busy), colour);
  }

  #readColours() {
    const style = getComputedStyle(this.#host);
    return Object.fromEntries(Object.entries(COLOURS).map(([name, [property, usual]]) => [name, parsed(style.getPropertyValue(property) || usual)]));
  }
}

function made() {
  const canvas = document.createElement("canvas");
  canvas.setAttribute("aria-hidden", "true"); // the element around it has a name
  Object.assign(canvas.style, { position: "absolute", display: "block", pointerEvents: "none" });
  return canvas;
}

/* A square in the middle of the element. */
function fit(canvas, { side, scale, width, height }) {
  const pixels = Math.round(side * scale);
  if (canvas.width !== pixels) canvas.width = canvas.height = pixels;
  const [left, top, size] = [`${(width - side) / 2}px`, `${(height - side) / 2}px`, `${side}px`];
  if (canvas.style.width !== size || canvas.style.left !== left || canvas.style.top !== top) {
    Object.assign(canvas.style, { width: size, height: size, left, top });
  }
}

/* Of #rgb or #rrggbb. */
function parsed(text) {
  const digits = text.trim().slice(1);
  const pairs = digits.length === 3 ? [...digits].map((digit) => digit + digit) : digits.match(/../g);
  return pairs.map((pair) => parseInt(pair, 16));
}

function blend(from, to, share) {
  return from.map((value, index) => value + (to[index] - value) * share);
}

function rgb([red, green, blue], alpha = 1) {
  return `rgb(${red} ${green} ${blue} / ${alpha})`;
}
