/* The body of the orb, drawn twice: by a graphics card, pixel by pixel, and by the processor, with a few gradients. Both have
   a light within, whose edge has the spectrum of the voice: deep sounds below, sharp ones above, the same to both sides. */

import { BANDS } from "./spectrum.js";

const POINTS = 64;
const TURN = Math.PI * 2;
/* How far the edge goes out with a band, as a share of the radius. */
const REACH = 0.17;

/* The share of the radius by which the edge is farther out at an angle (0 to the right, clockwise). */
export function edgeAt(angle, { bands, swell, phase, shift = 0 }) {
  const up = Math.acos(Math.max(-1, Math.min(1, Math.sin(angle)))) / Math.PI; // 0 below, 1 above
  const place = up * (BANDS - 1);
  const low = Math.min(BANDS - 2, Math.floor(place));
  const share = (1 - Math.cos((place - low) * Math.PI)) / 2;
  const voice = bands[low] * (1 - share) + bands[low + 1] * share;
  const sway = Math.sin(3 * angle + phase * 1.1 + shift) + 0.7 * Math.sin(5 * angle - phase * 1.7 + shift * 2) + 0.5 * Math.sin(2 * angle - phase * 0.6);
  return voice * REACH + swell * sway;
}

export class DrawnBody {
  canvas = null; // it has none of its own

  /* `pen` has its origin in the middle. */
  draw(pen, { side, radius, ink, light, deep, swell, strength, colour, hollow, level, bands, phase }) {
    if (hollow) return;
    this.#glow(pen, { reach: Math.min(side / 2, radius * (1.5 + 0.25 * level)), radius, ink, strength: 0.1 + 0.3 * colour * strength });
    for (const [size, alpha, shift] of [[1.13, 0.14, 2.1], [1.06, 0.26, 4.2]]) {
      curve(pen, radius * size, { bands, swell: swell * 1.3, phase, shift });
      pen.fillStyle = rgb(ink, alpha);
      pen.fill();
    }
    curve(pen, radius, { bands, swell, phase });
    const fill = pen.createRadialGradient(0, radius * 0.16, radius * 0.03, 0, 0, radius * 1.16);
    fill.addColorStop(0, rgb(blend(ink, light, 0.45 + 0.5 * strength)));
    fill.addColorStop(0.34, rgb(blend(ink, light, 0.12 + 0.34 * strength)));
    fill.addColorStop(0.68, rgb(ink));
    fill.addColorStop(0.93, rgb(blend(ink, deep, 0.34)));
    fill.addColorStop(1, rgb(blend(ink, light, 0.1)));
    pen.fillStyle = fill;
    pen.fill();
    this.#flows(pen, { radius, light, strength, phase });
  }

  /* What moves within: two soft lights that circle below the surface. */
  #flows(pen, { radius, light, strength, phase }) {
    for (const [speed, place, size, alpha] of [[0.5, 0, 0.62, 0.3], [-0.37, 2.4, 0.5, 0.24]]) {
      const angle = place + phase * speed;
      const [x, y] = [Math.cos(angle) * radius * 0.36, Math.sin(angle) * radius * 0.3];
      const fill = pen.createRadialGradient(x, y, 0, x, y, radius * size);
      fill.addColorStop(0, rgb(light, alpha * strength));
      fill.addColorStop(1, rgb(light, 0));
      pen.fillStyle = fill;
      pen.beginPath();
      pen.arc(x, y, radius * size, 0, TURN);
      pen.fill();
    }
  }

  #glow(pen, { reach, radius, ink, strength }) {
    const fill = pen.createRadialGradient(0, 0, radius * 0.8, 0, 0, reach);
    fill.addColorStop(0, rgb(ink, strength));
    fill.addColorStop(1, rgb(ink, 0));
    pen.fillStyle = fill;
    pen.beginPath();
    pen.arc(0, 0, reach, 0, TURN);
    pen.fill();
  }
}

/* A closed curve through points on the edge. */
function curve(pen, radius, edge) {
  const points = [];
  for (let index = 0; index < POINTS; index++) {
    const angle = (index / POINTS) * TURN;
    const distance = radius * (1 + edgeAt(angle, edge));
    points.push([Math.cos(angle) * distance, Math.sin(angle) * distance]);
  }
  const middle = ([x, y], [u, v]) => [(x + u) / 2, (y + v) / 2];
  pen.beginPath();
  pen.moveTo(...middle(points.at(-1), points[0]));
  points.forEach((point, index) => pen.quadraticCurveTo(...point, ...middle(point, points[(index + 1) % POINTS])));
  pen.closePath();
}

/* What calls itself a graphics card and is a program. */
const PROCESSORS = /swiftshader|llvmpipe|softpipe|software|basic render/i;
const VERTICES = `attribute vec2 place; varying vec2 at; void main() { at = place; gl_Position = vec4(place, 0.0, 1.0); }`;

/* The same edge and light as above, with veils within that flow (noise that is displaced by noise). */
const PIXELS = `
precision highp float;
varying vec2 at;
uniform float radius, swell, phase, strength, colour, level, pixel;
uniform float bands[${BANDS}];
uniform vec3 ink, light, deep;

float band(float place) {
  float voice = 0.0;
  for (int one = 0; one < ${BANDS}; one++) {
    float near = max(0.0, 1.0 - abs(place - float(one)));
    voice += bands[one] * (1.0 - cos(near * 3.14159265)) / 2.0;
  }
  return voice;
}
float edge(float angle, float shift) {
  float up = acos(clamp(sin(angle), -1.0, 1.0)) / 3.14159265;
  float sway = sin(3.0 * angle + phase * 1.1 + shift) + 0.7 * sin(5.0 * angle - phase * 1.7 + shift * 2.0) + 0.5 * sin(2.0 * angle - phase * 0.6);
  return band(up * float(${BANDS - 1})) * ${REACH} + swell * sway;
}
float hash(vec2 p) { return fract(sin(dot(p, vec2(127.1, 311.7))) * 43758.5453); }
float noise(vec2 p) {
  vec2 i = floor(p), f = fract(p);
  f = f * f * (3.0 - 2.0 * f);
  return mix(mix(hash(i), hash(i + vec2(1, 0)), f.x), mix(hash(i + vec2(0, 1)), hash(i + vec2(1, 1)), f.x), f.y);
}
float veils(vec2 p) { return 0.55 * noise(p) + 0.3 * noise(p * 2.1 + 3.7) + 0.15 * noise(p * 4.3 + 9.1); }

void main() {
  vec2 p = vec2(at.x, -at.y);
  float far = length(p), angle = atan(p.y, p.x);
  float glow = (0.1 + 0.34 * colour * strength) * pow(clamp(1.0 - (far - radius) / (radius * (0.6 + 0.25 * level)), 0.0, 1.0), 2.2) * step(radius * 0.8, far);
  vec4 sum = vec4(ink * glow, glow);
  for (int shell = 0; shell < 2; shell++) {
    float size = shell == 0 ? 1.13 : 1.06, alpha = shell == 0 ? 0.14 : 0.26;
    float inside = smoothstep(pixel, -pixel, far - radius * size * (1.0 + edge(angle, 2.1 + 2.1 * float(shell)) * 1.1)) * alpha;
    sum = sum * (1.0 - inside) + vec4(ink * inside, inside);
  }
  float rim = radius * (1.0 + edge(angle, 0.0));
  float inside = smoothstep(pixel, -pixel, far - rim);
  if (inside > 0.0) {
    float depth = clamp(far / rim, 0.0, 1.0);
    vec2 q = p / radius * 1.6;
    vec2 drift = vec2(veils(q + phase * 0.21), veils(q + 5.2 - phase * 0.17));
    float veil = veils(q * 1.15 + 1.9 * drift + vec2(0.0, phase * 0.12));
    float core = exp(-3.2 * dot(p - vec2(0.0, radius * 0.14), p - vec2(0.0, radius * 0.14)) / (radius * radius));
    vec3 body = mix(ink, deep, 0.46 * smoothstep(0.35, 0.95, depth) * (1.15 - veil));
    body = mix(body, light, clamp(strength * (0.95 * core + 0.75 * smoothstep(0.42, 0.85, veil) * (1.0 - depth * depth)), 0.0, 0.96));
    body = mix(body, mix(ink, light, 0.55), 0.55 * smoothstep(0.86, 1.0, depth));
    sum = sum * (1.0 - inside) + vec4(body * inside, inside);
  }
  gl_FragColor = sum;
}`;

export class LitBody {
  #gl;
  #places = new Map();

  /* Null where no graphics card would draw it. `lost` is called when it is gone. */
  static made(lost) {
    const canvas = document.createElement("canvas");
    // Without a graphics card the processor would do its work, for more than the gradients cost. Not every browser says so.
    const gl = canvas.getContext("webgl", { failIfMajorPerformanceCaveat: true, antialias: false });
    const named = gl?.getExtension("WEBGL_debug_renderer_info");
    if (!gl || PROCESSORS.test(gl.getParameter(named ? named.UNMASKED_RENDERER_WEBGL : gl.RENDERER))) return null;
    const body = new LitBody(canvas, gl);
    canvas.addEventListener("webglcontextlost", lost);
    return body.#build() ? body : null;
  }

  constructor(canvas, gl) {
    canvas.ariaHidden = "true";
    Object.assign(canvas.style, { position: "absolute", display: "block", pointerEvents: "none" });
    this.canvas = canvas;
    this.#gl = gl;
  }

  #build() {
    const gl = this.#gl;
    const program = gl.createProgram();
    for (const [type, source] of [[gl.VERTEX_SHADER, VERTICES], [gl.FRAGMENT_SHADER, PIXELS]]) {
      const shader = gl.createShader(type);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) return false;
    gl.useProgram(program);
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ARRAY_BUFFER, Float32Array.of(-1, -1, 3, -1, -1, 3), gl.STATIC_DRAW);
    const place = gl.getAttribLocation(program, "place");
    gl.enableVertexAttribArray(place);
    gl.vertexAttribPointer(place, 2, gl.FLOAT, false, 0, 0);
    for (const name of ["radius", "swell", "phase", "strength", "colour", "level", "pixel", "bands", "ink", "light", "deep"]) {
      this.#places.set(name, gl.getUniformLocation(program, name));
    }
    return true;
  }

  draw(_pen, { side, radius, ink, light, deep, hollow, bands, ...numbers }) {
    const gl = this.#gl;
    const { width } = this.canvas;
    gl.viewport(0, 0, width, width);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    if (hollow) return;
    const at = (name) => this.#places.get(name);
    const shown = { ...numbers, radius: (2 * radius) / side, pixel: 1.5 / width };
    for (const name of ["radius", "swell", "phase", "strength", "colour", "level", "pixel"]) gl.uniform1f(at(name), shown[name]);
    for (const [name, colour] of Object.entries({ ink, light, deep })) gl.uniform3f(at(name), ...colour.map((part) => part / 255));
    gl.uniform1fv(at("bands"), bands);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
  }
}

function blend(from, to, share) {
  return from.map((value, index) => value + (to[index] - value) * share);
}

function rgb([red, green, blue], alpha = 1) {
  return `rgb(${red} ${green} ${blue} / ${alpha})`;
}
