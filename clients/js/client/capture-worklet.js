/* The microphone's side of the audio thread: collects quanta of 128 frames to chunks of 20 ms, as 16-bit samples at the
   context's own rate. Nothing is resampled here: the rate is told to the server, which does it better. */

const CHUNK_FRAMES = Math.round(sampleRate * 0.02);

class Capture extends AudioWorkletProcessor {
  #chunk = new Int16Array(CHUNK_FRAMES);
  #filled = 0;
  #peak = 0;

  /** @param {Float32Array[][]} inputs */
  process([input]) {
    const channels = input.length;
    if (channels === 0) return true; // the source is not connected yet
    const first = input[0];
    for (let index = 0; index < first.length; index++) {
      let sample = first[index];
      for (let channel = 1; channel < channels; channel++) sample += input[channel][index];
      sample /= channels;
      this.#peak = Math.max(this.#peak, Math.abs(sample));
      this.#chunk[this.#filled++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
      if (this.#filled === this.#chunk.length) this.#post();
    }
    return true;
  }

  #post() {
    const samples = this.#chunk;
    this.port.postMessage({ samples, peak: this.#peak }, [samples.buffer]);
    this.#chunk = new Int16Array(CHUNK_FRAMES);
    this.#filled = 0;
    this.#peak = 0;
  }
}

registerProcessor("capture", Capture);
