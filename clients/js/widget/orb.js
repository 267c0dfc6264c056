/* The centre of the page: one body whose motion shows what goes on. It is drawn as closed curves whose edge follows the
   levels of both voices.

   away       a broken ring, still           listening  the person's colour, a slow swell
   ready      small, grey, asleep, still     hearing    its edge follows the voice, and rings draw in
   busy       small, with arcs that circle   speaking   the server's colour, its edge follows, and rings go out
   muted      struck through, still          interrupted (for a moment)  the ring breaks and flies apart
   ducked     smaller and paler than speaking, its edge follows both voices

   Where less motion is wanted, each state is a picture that stands still. What stands still is drawn once: a page that waits
   for hours should cost nothing, least of all where no graphics card draws it. */

const POINTS = 56;
const BREAK_MS = 550;
const STILL_BREAK_MS = 1200;
const RING_MS = 1500;
const REST_FRAME_MS = 33;
/* The orb rests below this level of sound. */
const QUIET = 0.02;
const STILL = new Set(["away", "muted", "ready"]);
/* Where less motion is wanted, these have rings that stand still. */
const STILL_RINGS = new Set(["hearing", "speaking", "ducked"]);
const RECENT_FRAMES = 60;
const TURN = Math.PI * 2;

/* What a state looks like: size, how much of the server's colour and of that of work, how much colour at all, the swell of
   the edge. */
const LOOKS = {
  away: { size: 0.62, server: 0, work: 0, colour: 0, swell: 0 },
  ready: { size: 0.72, server: 0, work: 0, colour: 0.35, swell: 0.012 },
  listening: { size: 0.86, server: 0, work: 0, colour: 1, swell: 0.02 },
  hearing: { size: 0.92, server: 0, work: 0, colour: 1, swell: 0.035 },
  busy: { size: 0.66, server: 0, work: 1, colour: 1, swell: 0.03 },
  speaking: { size: 0.94, server: 1, work: 0, colour: 1, swell: 0.03 },
  ducked: { size: 0.74, server: 1, work: 0, colour: 0.55, swell: 0.03 },
  muted: { size: 0.72, server: 0, work: 0, colour: 0.15, swell: 0 },
};

export class Orb {
  /* Milliseconds of script that each of the last frames took, and how many were drawn. */
  cost = { recent: [], frames: 0 };
  #canvas;
  #pen;
  #state = "away";
  #now = { ...LOOKS.away };
  #levels = { you: 0, server: 0 };
  #wanted = { you: 0, server: 0 };
  #rings = []; // { born, inward }
  #brokenAt = -Infinity;
  #breaking = false;
  #drawnAt = 0;
  #phase = 0;
  #reach = 0;
  #stale = true;
  #looping = false;
  #colours = null;
  #calm = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas) {
    this.#canvas = canvas;
    this.#pen = canvas.getContext("2d");
    canvas.orb = this;
    const repaint = () => {
      this.#colours = null;
      this.#change();
    };
    new ResizeObserver(() => {
      repaint();
      this.#frame(performance.now()); // at once: until then the browser stretches the picture of the old size
    }).observe(canvas);
    this.repaint = repaint;
    addEventListener("themechange", repaint);
    this.#calm.addEventListener("change", repaint);
    this.#change();
  }

  /* Something is to be drawn anew. */
  #change() {
    this.#stale = true;
    if (this.#looping) return;
    this.#looping = true;
    const loop = (now) => {
      this.#looping = this.#frame(now);
      if (this.#looping) requestAnimationFrame(loop);
    };
    requestAnimationFrame(loop);
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

  /* `side` is "you" or "server"; `peak` from 0 to 1. */
  add(side, peak) {
    this.#wanted[side] = Math.max(this.#wanted[side], Math.min(1, Math.sqrt(peak)));
  }

  /* Whether it goes on to move. */
  #frame(now) {
    const since = now - this.#drawnAt;
    const rests = STILL.has(this.#state) || this.#calm.matches;
    const breaking = now - this.#brokenAt < (this.#calm.matches ? STILL_BREAK_MS : BREAK_MS);
    if (breaking !== this.#breaking) this.#stale = true; // also to draw the body whole again
    this.#breaking = breaking;
    const moves = breaking && !this.#calm.matches;
    const slow = this.#state === "listening" && Math.max(this.#level, this.#wanted.you) < QUIET;
    if (!this.#stale && !moves && (rests ? this.#settled : slow && since < REST_FRAME_MS)) return breaking || !rests;
    const begun = performance.now();
    this.#stale = false;
    this.#move(Math.min(0.1, since / 1000), now);
    this.#drawnAt = now;
    this.#draw(now);
    this.cost.frames += 1;
    this.cost.recent.push(performance.now() - begun);
    if (this.cost.recent.length > RECENT_FRAMES) this.cost.recent.shift();
    return true;
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
    }
    if (!calm) this.#phase += seconds * (this.#state === "busy" ? 2.6 : 0.8 + 2.2 * this.#level);
    const rings = this.#state === "hearing" || this.#state === "speaking";
    const last = this.#rings.at(-1)?.born ?? -Infinity;
    if (rings && !calm && this.#level > 0.12 && now - last > 420) this.#rings.push({ born: now, inward: this.#state === "hearing" });
    while (this.#rings.length && now - this.#rings[0].born > RING_MS) this.#rings.shift();
  }

  /* Of whose voice it is. */
  get #level() {
    if (this.#state === "speaking") return this.#levels.server;
    if (this.#state === "ducked") return Math.max(this.#levels.server, this.#levels.you);
    return this.#state === "hearing" || this.#state === "listening" ? this.#levels.you : 0;
  }

  #draw(now) {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (width === 0) return;
    const scale = Math.min(2, devicePixelRatio || 1);
    if (this.#canvas.width !== Math.round(width * scale) || this.#canvas.height !== Math.round(height * scale)) {
      this.#canvas.width = Math.round(width * scale);
      this.#canvas.height = Math.round(height * scale);
    }
    this.#colours ??= this.#readColours();
    const pen = this.#pen;
    pen.setTransform(scale, 0, 0, scale, (width / 2) * scale, (height / 2) * scale);
    pen.clearRect(-width / 2, -height / 2, width, height);
    const unit = Math.min(width, height) * 0.315;
    const radius = unit * this.#now.size * (1 + 0.12 * this.#level);
    const ink = this.#mixed();
    this.#reach = Math.min(width, height) / 2;
    if (this.#state === "away") return this.#brokenRing(radius, ink, 0, 1);
    this.#glow(radius, ink);
    for (const ring of this.#rings) this.#ring(ring, unit, radius, ink, now);
    this.#body(radius, ink);
    if (this.#state === "busy") this.#arcs(radius, ink);
    if (this.#calm.matches && STILL_RINGS.has(this.#state)) this.#stillRings(radius, ink);
    if (this.#state === "muted") this.#strike(radius);
    if (!this.#breaking) return;
    const broken = this.#calm.matches ? 0.4 : (now - this.#brokenAt) / BREAK_MS;
    this.#brokenRing(radius * (1.1 + 0.4 * broken), this.#colours.server, broken, 3);
  }

  #body(radius, ink) {
    const pen = this.#pen;
    const edge = this.#now.swell + 0.06 * this.#level;
    for (const [size, alpha, shift] of [[1.16, 0.16, 2.1], [1.07, 0.28, 4.2], [1, 1, 0]]) {
      this.#curve(radius * size, edge * (2 - size), shift);
      if (alpha < 1) {
        pen.fillStyle = rgb(ink, alpha);
      } else {
        const fill = pen.createRadialGradient(-radius * 0.35, -radius * 0.42, radius * 0.05, 0, 0, radius * 1.15);
        fill.addColorStop(0, rgb(blend(ink, this.#colours.light, 0.5)));
        fill.addColorStop(0.45, rgb(ink));
        fill.addColorStop(1, rgb(blend(ink, this.#colours.deep, 0.2)));
        pen.fillStyle = fill;
      }
      pen.fill();
    }
  }

  /* A closed curve through points whose distance sways with three waves that turn against each other. */
  #curve(radius, edge, shift) {
    const pen = this.#pen;
    const phase = this.#phase;
    const points = [];
    for (let index = 0; index < POINTS; index++) {
      const angle = (index / POINTS) * TURN;
      const sway =
        Math.sin(3 * angle + phase * 1.1 + shift) + 0.7 * Math.sin(5 * angle - phase * 1.7 + shift * 2) + 0.5 * Math.sin(2 * angle - phase * 0.6);
      const distance = radius * (1 + edge * sway);
      points.push([Math.cos(angle) * distance, Math.sin(angle) * distance]);
    }
    const middle = ([x, y], [u, v]) => [(x + u) / 2, (y + v) / 2];
    pen.beginPath();
    pen.moveTo(...middle(points.at(-1), points[0]));
    points.forEach((point, index) => pen.quadraticCurveTo(...point, ...middle(point, points[(index + 1) % POINTS])));
    pen.closePath();
  }

  #glow(radius, ink) {
    const reach = Math.min(this.#reach, radius * (1.5 + 0.2 * this.#level));
    const fill = this.#pen.createRadialGradient(0, 0, radius * 0.8, 0, 0, reach);
    fill.addColorStop(0, rgb(ink, 0.3 * this.#now.colour + 0.06));
    fill.addColorStop(1, rgb(ink, 0));
    this.#pen.fillStyle = fill;
    this.#pen.beginPath();
    this.#pen.arc(0, 0, reach, 0, TURN);
    this.#pen.fill();
  }

  #ring({ born, inward }, unit, radius, ink, now) {
    const age = (now - born) / RING_MS;
    const far = unit * 1.45;
    const at = inward ? far - (far - radius) * age : radius + (far - radius) * age;
    this.#stroke(rgb(ink, 0.5 * (inward ? Math.sin(age * Math.PI) : 1 - age)), 1.5 + 1.5 * (inward ? age : 1 - age));
    this.#pen.beginPath();
    this.#pen.arc(0, 0, at, 0, TURN);
    this.#pen.stroke();
  }

  #stillRings(radius, ink) {
    for (const [size, alpha] of [[1.26, 0.7], [1.44, 0.4]]) {
      this.#stroke(rgb(ink, alpha), Math.max(2, radius * 0.03));
      this.#pen.beginPath();
      this.#pen.arc(0, 0, radius * size, 0, TURN);
      this.#pen.stroke();
    }
  }

  #arcs(radius, ink) {
    for (const [place, length, size] of [[0, 1.5, 1.36], [TURN / 2, 1.5, 1.36], [TURN / 3, 0.8, 1.54], [-TURN / 6, 0.8, 1.54]]) {
      const from = place + this.#phase * (size > 1.4 ? -0.8 : 1);
      this.#stroke(rgb(ink, size > 1.4 ? 0.4 : 0.75), Math.max(2, radius * 0.05));
      this.#pen.beginPath();
      this.#pen.arc(0, 0, radius * size, from, from + length);
      this.#pen.stroke();
    }
  }

  #strike(radius) {
    for (const [colour, width] of [[this.#colours.paper, radius * 0.3], [this.#colours.bad, radius * 0.11]]) {
      this.#stroke(rgb(colour), width);
      this.#pen.beginPath();
      this.#pen.moveTo(-radius * 0.8, -radius * 0.8);
      this.#pen.lineTo(radius * 0.8, radius * 0.8);
      this.#pen.stroke();
    }
  }

  #brokenRing(radius, ink, age, width) {
    const pieces = 9;
    this.#stroke(rgb(ink, 0.9 * (1 - age)), width + radius * 0.03);
    for (let piece = 0; piece < pieces; piece++) {
      const from = (piece / pieces) * TURN + age;
      this.#pen.beginPath();
      this.#pen.arc(0, 0, radius, from, from + (TURN / pieces) * 0.6);
      this.#pen.stroke();
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
    const style = getComputedStyle(this.#canvas);
    const names = { you: "--you", server: "--server", work: "--busy", rest: "--rest", light: "--orb-light", deep: "--orb-deep", paper: "--paper", bad: "--bad" };
    return Object.fromEntries(Object.entries(names).map(([name, property]) => [name, parsed(style.getPropertyValue(property))]));
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
