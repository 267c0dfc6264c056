/* The sound of a call as a picture of two channels, the user's above and the answer's below, and the place in it that sounds.
   Until the samples have come, and where there are too many of them, it shows when who spoke. */

/* Peaks that are kept of each channel. */
const BUCKETS = 2400;
/* Longer files are not read for their picture. */
const MOST_BYTES = 256 * 1024 * 1024;
const HEADER_BYTES = 4096;

export class Wave {
  #peaks = null;
  #turns = [];
  #length = 1;
  #at = 0;
  #selected = null;
  #waits = false;

  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.#later()).observe(canvas);
    addEventListener("themechange", () => this.#later());
  }

  /* `turns` have { user, answer } with start_ms and end_ms. */
  show(turns, lengthMs) {
    this.#turns = turns;
    this.#length = Math.max(1, lengthMs);
    this.#later();
  }

  peaks(peaks) {
    const loudest = Math.max(0.1, ...peaks.flatMap((side) => side.reduce((most, peak) => Math.max(most, peak), 0)));
    this.#peaks = peaks.map((side) => side.map((peak) => peak / loudest));
    this.#later();
  }

  /* What sounds, and the turn that is looked at, [from, to] or null. */
  at(ms, selected) {
    this.#at = ms;
    this.#selected = selected;
    this.#later();
  }

  /* The time at a place of the window. */
  timeAt(clientX) {
    const { left, width } = this.canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (clientX - left) / width)) * this.#length;
  }

  #later() {
    if (this.#waits) return;
    this.#waits = true;
    requestAnimationFrame(() => {
      this.#waits = false;
      this.#draw();
    });
  }

  #draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.clearRect(0, 0, width, height);
    const x = (ms) => (ms / this.#length) * width;
    const middle = height / 2;
    if (this.#selected) {
      const [from, to] = this.#selected;
      pen.fillStyle = colour("--line");
      pen.globalAlpha = 0.6;
      pen.fillRect(x(from), 0, Math.max(2 * scale, x(to) - x(from)), height);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colour("--line");
    pen.fillRect(0, middle - scale / 2, width, scale);
    const sides = [["user", "--you", -1], ["answer", "--server", 1]];
    const step = 2 * scale + scale; // bars of two pixels, with one between them
    for (const [channel, [side, name, way]] of sides.entries()) {
      pen.fillStyle = colour(name);
      if (this.#peaks) {
        const peaks = this.#peaks[Math.min(channel, this.#peaks.length - 1)];
        for (let left = 0; left < width; left += step) {
          const from = Math.floor((left / width) * peaks.length);
          const to = Math.max(from + 1, Math.floor(((left + step) / width) * peaks.length));
          let peak = 0;
          for (let place = from; place < to && place < peaks.length; place++) peak = Math.max(peak, peaks[place]);
          const tall = Math.sqrt(peak) * (middle - 3 * scale); // soft speech is to be seen, too
          if (tall < 0.5) continue;
          pen.globalAlpha = left < x(this.#at) ? 1 : 0.45;
          pen.fillRect(left, way < 0 ? middle - scale - tall : middle + scale, 2 * scale, tall);
        }
      } else {
        for (const turn of this.#turns) {
          const said = turn[side];
          if (!(said?.end_ms > said?.start_ms)) continue;
          pen.globalAlpha = said.start_ms < this.#at ? 0.8 : 0.4;
          pen.fillRect(x(said.start_ms), way < 0 ? middle * 0.45 : middle + scale, Math.max(scale, x(said.end_ms) - x(said.start_ms)), middle * 0.55 - scale);
        }
      }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--ink");
    pen.fillRect(Math.round(x(this.#at) - scale / 2), 0, Math.max(1, Math.round(1.5 * scale)), height);
  }
}

/* The peaks of both channels of a WAV file with 16-bit samples, 0 to 1, read as they come. `keep` gets every piece. Null
   if that is not such a file, or one too large for a picture. */
export async function peaksOf(response, keep = null) {
  if (!keep && Number(response.headers.get("content-length")) > MOST_BYTES) {
    await response.body.cancel();
    return null;
  }
  const reader = response.body.getReader();
  let header = new Uint8Array(0);
  let format = null;
  let rest = new Uint8Array(0);
  let peaks = null;
  let frame = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return peaks;
    keep?.(value);
    let bytes = value;
    if (!format) {
      header = joined(header, value);
      format = formatOf(header);
      if (!format && header.length < HEADER_BYTES) continue;
      if (!format) format = { channels: 0 };
      if (format.channels) peaks = Array.from({ length: format.channels }, () => new Float32Array(BUCKETS));
      else if (!keep) return reader.cancel().then(() => null);
      bytes = header.subarray(format.begin);
    }
    if (!peaks) continue;
    const whole = rest.length ? joined(rest, bytes) : bytes;
    const { channels, frames } = format;
    const count = Math.floor(whole.length / (2 * channels));
    const samples = new DataView(whole.buffer, whole.byteOffset, count * 2 * channels);
    for (let place = 0; place < count; place++, frame++) {
      const bucket = Math.min(BUCKETS - 1, Math.floor((frame / frames) * BUCKETS));
      for (let channel = 0; channel < channels; channel++) {
        const level = Math.abs(samples.getInt16(2 * (place * channels + channel), true)) / 0x8000;
        if (level > peaks[channel][bucket]) peaks[channel][bucket] = level;
      }
    }
    rest = whole.slice(count * 2 * channels);
  }
}

/* Channels, rate, frames and where the samples begin, or null while that has not come. */
export function formatOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const tag = (place) => String.fromCharCode(...bytes.subarray(place, place + 4));
  let [channels, rate] = [0, 0];
  for (let place = 12; place + 8 <= bytes.length; ) {
    const size = view.getUint32(place + 4, true);
    if (tag(place) === "fmt " && place + 24 <= bytes.length) {
      channels = view.getUint16(place + 8, true) === 1 && view.getUint16(place + 22, true) === 16 ? view.getUint16(place + 10, true) : 0;
      rate = view.getUint32(place + 12, true);
    }
    if (tag(place) === "data") return { channels, rate, frames: Math.max(1, size / (2 * channels)), begin: place + 8 };
    place += 8 + size + (size % 2);
  }
  return null;
}

function joined(one, other) {
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}
