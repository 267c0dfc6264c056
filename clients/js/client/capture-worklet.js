/* The microphone's side of the audio thread: collects quanta of 128 frames to pieces of 20 ms, as 16-bit samples at the
   context's own rate. Nothing is resampled here: the rate is told to the server, which does it better.

   After seconds of silence pieces wait for one another, up to 100 ms: a page that listens all day should cost little. The
   first that is not silent takes those before it along at once, so speech is sent no later for it. */

const PIECE_FRAMES = Math.round(sampleRate * 0.02);
const SILENT_PIECES = 5;
/* As long as that a turn may still be ending, which silence decides. */
const CALM_PIECES = 200;
/* What is left of a quiet room where noise is suppressed. */
const SILENCE = 0.004;

class Capture extends AudioWorkletProcessor {
  #chunk = new Int16Array(PIECE_FRAMES * SILENT_PIECES);
  #filled = 0;
  #peak = 0;
  #calm = 0; // pieces of silence so far
  #isClosed = false;

  constructor() {
    super();
    this.port.onmessage = () => (this.#isClosed = true); // whatever the page says: it needs no more
  }

  /** @param {Float32Array[][]} inputs */
  process([input]) {
    if (this.#isClosed) return false; // else the browser would keep it, and call it, as long as there is sound
    const channels = input.length;
    if (channels === 0) return true; // the source is not connected yet
    const first = input[0];
    const chunk = this.#chunk;
    let [filled, peak] = [this.#filled, this.#peak];
    for (let index = 0; index < first.length; index++) {
      let sample = first[index];
      for (let channel = 1; channel < channels; channel++) sample += input[channel][index];
      sample /= channels;
      peak = Math.max(peak, Math.abs(sample));
      chunk[filled++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
      if (filled % PIECE_FRAMES > 0) continue;
      this.#calm = peak < SILENCE ? this.#calm + 1 : 0;
      if (filled < chunk.length && this.#calm > CALM_PIECES) continue;
      const samples = chunk.slice(0, filled);
      this.port.postMessage({ samples, peak }, [samples.buffer]);
      filled = peak = 0;
    }
    [this.#filled, this.#peak] = [filled, peak];
    return true;
  }
}

registerProcessor("capture", Capture);
