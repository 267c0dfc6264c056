/* Plays again what was said in a turn, or what was heard of its answer. */

import { cut } from "./recording.js";

export class Replay {
  #source = null;

  /* `quiet(on)` keeps an open microphone from hearing it. */
  constructor(client, { quiet }) {
    Object.assign(this, { sound: client.sound, quiet });
    client.addEventListener("turnstart", () => this.stop());
  }

  /* `side` is "user" or "server"; once more, or another one, while it plays: stops. */
  async play({ sound, heardMs }, side) {
    const again = this.#source === null;
    this.stop();
    if (!again) return;
    const context = await this.sound.wake();
    this.stop(); // pressed again meanwhile: the last one counts
    const heard = side === "user" || heardMs === null ? Infinity : Math.round((heardMs / 1000) * context.sampleRate);
    const pieces = cut(sound[side], heard);
    const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
    if (length === 0) return; // the page keeps only so much
    const buffer = new AudioBuffer({ length, sampleRate: context.sampleRate });
    let place = 0;
    for (const piece of pieces) {
      buffer.copyToChannel(Float32Array.from(piece, (sample) => sample / 32768), 0, place);
      place += piece.length;
    }
    this.#source = new AudioBufferSourceNode(context, { buffer });
    this.#source.onended = () => this.stop();
    this.#source.connect(context.destination);
    this.quiet(true);
    this.#source.start();
  }

  stop() {
    const source = this.#source;
    if (!source) return;
    this.#source = null;
    source.onended = null;
    source.stop();
    this.quiet(false);
  }
}
