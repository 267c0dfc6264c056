/* A soft sound while an answer is long in coming: two low notes every now and then, until something is heard. */

const BEGINS_MS = 2000;
const EVERY_MS = 1500;
/* -40 dB of full scale. */
const PEAK = 0.01;
const NOTES = [311, 233]; // Hz
const NOTE_SECONDS = 0.1;
const FADE_SECONDS = 0.02;

/* Play the notes once. Returns what they go through, which can be turned down. */
export function playNotes(context, at = context.currentTime) {
  const output = new GainNode(context, { gain: 1 });
  output.connect(context.destination);
  // Each note swells and fades, so that nothing clicks.
  const swell = Float32Array.from({ length: 33 }, (_value, place) => PEAK * Math.sin((Math.PI * place) / 32) ** 2);
  NOTES.forEach((frequency, place) => {
    const note = new OscillatorNode(context, { frequency });
    const volume = new GainNode(context, { gain: 0 });
    const begin = at + place * NOTE_SECONDS;
    volume.gain.setValueCurveAtTime(swell, begin, NOTE_SECONDS);
    note.connect(volume).connect(output);
    note.start(begin);
    note.stop(begin + NOTE_SECONDS);
    if (place === NOTES.length - 1) note.onended = () => output.disconnect();
  });
  return output;
}

export class ThinkingSound {
  #client;
  #wanted;
  #timer = null;
  #output = null;

  /* `wanted()` tells whether it is to be heard. */
  constructor(client, { wanted }) {
    this.#client = client;
    this.#wanted = wanted;
    client.addEventListener("change", () => this.look());
  }

  /* To be called when `wanted()` may be another one. */
  look() {
    if (this.#client.state !== "thinking" || !this.#wanted()) return this.#stop();
    this.#timer ??= setTimeout(() => this.#play(), BEGINS_MS);
  }

  #play() {
    const { context } = this.#client.sound;
    if (context?.state === "running") this.#output = playNotes(context);
    this.#timer = setTimeout(() => this.#play(), EVERY_MS);
  }

  #stop() {
    if (this.#timer === null) return;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#output?.gain.setTargetAtTime(0, this.#output.context.currentTime, FADE_SECONDS / 3);
    this.#output = null;
  }
}
