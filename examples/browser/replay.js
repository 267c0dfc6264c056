/* Plays again what was said in a turn. */

export class Replay {
  #source = null;

  /* `quiet(on)` keeps an open microphone from hearing it. */
  constructor(client, { quiet }) {
    Object.assign(this, { sound: client.sound, quiet });
    client.addEventListener("turnstart", () => this.stop());
  }

  /* A turn's own voice; once more, or another turn, while it plays: stops. */
  async play({ sound: { user } }) {
    const again = this.#source === null;
    this.stop();
    if (!again) return;
    const context = await this.sound.wake();
    const length = user.reduce((sum, piece) => sum + piece.length, 0);
    if (length === 0) return; // the page keeps only so much
    const buffer = new AudioBuffer({ length, sampleRate: context.sampleRate });
    let place = 0;
    for (const piece of user) {
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
