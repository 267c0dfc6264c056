/* The loudspeaker's side of the audio thread: what has arrived, played without clicks and without holes where it can be.

   Playing begins when enough is there (`target`); where sound runs out in the middle of an answer it fades out, the
   target grows, and playing begins again when that much has gathered. A flush fades out within milliseconds. While it is not
   known whether somebody interrupts, the sound is lowered and goes on. */

const START_MS = 60;
const STEP_MS = 40;
const MAX_MS = 480;
const FADE_MS = 4;
/* How far the sound is lowered: by 15 dB, and back, within so much. */
const DUCKED = 10 ** (-15 / 20);
const DUCK_MS = 20;
/* So long without a hole, and the target shrinks by a step. */
const CALM_SECONDS = 30;
/* What is held at most: far more than a server sends that is asked not to run ahead. Where that is not enough, an answer ends
   early, as a whole: pieces out of its middle would make other words of it. */
const MAX_SECONDS = 1800;

/** What is known of one answer. `place` is where the first of its chunks goes on.
 @typedef {{ id: number, chunks: Int16Array[], place: number, queued: number, played: number, ended: boolean, begun: boolean }} Segment */
/** @typedef {{ type: string, id: number, played?: number, offset?: number }} Report */

export class PlayoutBuffer {
  /** @type {Segment[]} */
  #segments = [];
  #waiting = true;
  #gain = 0;
  /* What the sound is multiplied by, and what that goes to. */
  #level = 1;
  #wantedLevel = 1;
  /** @type {Float32Array | null} */
  #tail = null;
  #calm = 0;
  /* The answer that ends early. */
  /** @type {number | null} */
  #cut = null;

  /* `report` is called with { type: started | ended | flushed | underrun | overflow, id, played, offset }: `played`
     samples of the answer `id` were given out, and it happened `offset` samples into the current pull. */
  /** @param {number} rate @param {(report: Report) => void} report */
  constructor(rate, report) {
    this.rate = rate;
    this.report = report;
    this.fade = Math.max(8, Math.round((rate * FADE_MS) / 1000));
    this.slope = (1 - DUCKED) / ((rate * DUCK_MS) / 1000);
    this.targetMs = START_MS;
    this.underruns = 0;
    this.queued = 0;
  }

  /* The answer that is being played, or null. */
  get current() {
    return this.#segments[0] ?? null;
  }

  /* Whether nothing is there that could sound. */
  get idle() {
    return this.#segments.length === 0 && this.#tail === null;
  }

  /* `place` is where the samples begin in the answer, in samples: an answer that was flushed may go on. */
  /** @param {number} id @param {Int16Array} samples @param {number} [place] */
  push(id, samples, place = 0) {
    if (id === this.#cut) return;
    let segment = this.#segments.find((one) => one.id === id);
    if (!segment) {
      segment = { id, chunks: [], place: 0, queued: 0, played: place, ended: false, begun: false };
      this.#segments.push(segment);
    }
    if (samples.length === 0) return;
    if (this.queued + samples.length > MAX_SECONDS * this.rate) {
      this.#cut = id;
      segment.ended = true;
      this.report({ type: "overflow", id });
      return;
    }
    segment.chunks.push(samples);
    segment.queued += samples.length;
    this.queued += samples.length;
  }

  /* Nothing more comes of this answer. */
  /** @param {number} id */
  end(id) {
    const segment = this.#segments.find((one) => one.id === id);
    if (segment) segment.ended = true;
  }

  /* Lower the sound, of this answer and those behind it, or let it be as loud as before. */
  /** @param {boolean} lowered */
  duck(lowered) {
    this.#wantedLevel = lowered ? DUCKED : 1;
    if (this.#waiting) this.#level = this.#wantedLevel;
  }

  /* Forget everything; what is sounding fades out. */
  flush() {
    const segment = this.current;
    if (segment && !this.#waiting) this.#cutTail(segment);
    for (const one of this.#segments) this.report({ type: "flushed", id: one.id, played: one.played, offset: 0 });
    this.#segments = [];
    this.queued = 0;
    this.#waiting = true;
  }

  /* Fill `output` with the next samples. */
  /** @param {Float32Array} output */
  pull(output) {
    let place = 0;
    while (place < output.length) {
      if (this.#tail === null && !this.#ready(place)) break;
      // What is ready may be no more than the end of what there was.
      place = this.#tail === null ? this.#play(output, place) : this.#playTail(this.#tail, output, place);
    }
    output.fill(0, place);
  }

  /** @param {number} offset @returns {boolean} */
  #ready(offset) {
    const segment = this.current;
    if (!segment) return false;
    if (segment.queued === 0 && segment.ended) {
      this.#segments.shift();
      this.#waiting = true;
      this.report({ type: "ended", id: segment.id, played: segment.played, offset });
      return this.#ready(offset);
    }
    if (this.#waiting) {
      if (!segment.ended && segment.queued < (this.targetMs / 1000) * this.rate) return false;
      this.#waiting = false;
      this.#gain = 0;
      if (!segment.begun) this.report({ type: "started", id: segment.id, played: segment.played, offset });
      segment.begun = true;
    }
    if (!segment.ended && segment.queued <= this.fade) {
      this.#runOut(segment, offset);
      return this.#tail !== null;
    }
    return true;
  }

  /** @param {Segment} segment @param {number} offset */
  #runOut(segment, offset) {
    this.#cutTail(segment);
    this.#waiting = true;
    this.#calm = 0;
    this.underruns += 1;
    this.targetMs = Math.min(MAX_MS, this.targetMs + STEP_MS);
    this.report({ type: "underrun", id: segment.id, played: segment.played, offset });
  }

  /* Takes the next few samples out of a segment, with the slope down that ends them. */
  /** @param {Segment} segment */
  #cutTail(segment) {
    const length = Math.min(this.fade, segment.queued);
    if (length === 0) return;
    const tail = new Float32Array(length);
    for (let index = 0; index < length; index++) {
      tail[index] = this.#next(segment) * this.#gain * this.#level * (1 - (index + 1) / length);
    }
    this.#tail = tail;
  }

  /** @param {Float32Array} tail @param {Float32Array} output @param {number} place */
  #playTail(tail, output, place) {
    const length = Math.min(tail.length, output.length - place);
    output.set(tail.subarray(0, length), place);
    this.#tail = length === tail.length ? null : tail.subarray(length);
    return place + length;
  }

  /** @param {Float32Array} output @param {number} place */
  #play(output, place) {
    const segment = /** @type {Segment} */ (this.current); // one is ready
    const spare = segment.ended ? segment.queued : segment.queued - this.fade;
    const end = Math.min(output.length, place + Math.max(1, spare));
    const slope = 1 / this.fade;
    this.#calm += end - place;
    for (; place < end; place++) {
      this.#gain = Math.min(1, this.#gain + slope);
      if (this.#level !== this.#wantedLevel) this.#moveLevel();
      output[place] = this.#next(segment) * this.#gain * this.#level;
    }
    if (this.#calm > CALM_SECONDS * this.rate) {
      this.#calm = 0;
      this.targetMs = Math.max(START_MS, this.targetMs - STEP_MS);
    }
    return place;
  }

  #moveLevel() {
    const away = this.#wantedLevel - this.#level;
    this.#level = Math.abs(away) <= this.slope ? this.#wantedLevel : this.#level + Math.sign(away) * this.slope;
  }

  /** @param {Segment} segment */
  #next(segment) {
    const chunk = segment.chunks[0];
    const sample = chunk[segment.place++] / 32768;
    if (segment.place === chunk.length) {
      segment.chunks.shift();
      segment.place = 0;
    }
    segment.queued -= 1;
    segment.played += 1;
    this.queued -= 1;
    return sample;
  }
}

/* Every so many quanta the page hears how far playing is: about 20 ms at 48 kHz. */
const REPORT_QUANTA = 8;

if (globalThis.AudioWorkletProcessor) {
  class Playback extends AudioWorkletProcessor {
    #quanta = 0;
    #peak = 0;
    #buffer = new PlayoutBuffer(sampleRate, (event) => {
      this.port.postMessage({ ...event, time: currentTime + (event.offset ?? 0) / sampleRate });
    });

    constructor() {
      super();
      this.port.onmessage = ({ data }) => {
        if (data.type === "push") this.#buffer.push(data.id, data.samples, data.place);
        else if (data.type === "end") this.#buffer.end(data.id);
        else if (data.type === "duck") this.#buffer.duck(data.lowered);
        else if (data.type === "flush") this.#buffer.flush();
      };
    }

    /** @param {Float32Array[][]} _inputs @param {Float32Array[][]} outputs */
    process(_inputs, [[output]]) {
      const buffer = this.#buffer;
      if (buffer.idle && this.#peak === 0) return true; // nothing sounds, nor did when the page was told last
      const busy = buffer.current !== null;
      buffer.pull(output);
      for (const sample of output) this.#peak = Math.max(this.#peak, Math.abs(sample));
      if (++this.#quanta >= REPORT_QUANTA) {
        if (busy || this.#peak > 0) {
          const { queued, underruns, targetMs, current } = buffer;
          const played = current?.played ?? 0;
          this.port.postMessage({ type: "level", peak: this.#peak, queued, underruns, targetMs, id: current?.id, played });
        }
        this.#quanta = 0;
        this.#peak = 0;
      }
      return true;
    }
  }
  registerProcessor("playback", Playback);
}
