/* The page's one AudioContext. The browser lets it run only after a gesture, and may put it to sleep at any time. */

/* What the protocol takes as a sample rate. */
const LOWEST_RATE = 8000;
const HIGHEST_RATE = 192000;
const USUAL_RATE = 48000;

export class Sound extends EventTarget {
  #context = null;
  #loading = null;

  /* The context's rate; null before the first gesture. */
  get rate() {
    return this.#context?.sampleRate ?? null;
  }

  get context() {
    return this.#context;
  }

  get locked() {
    return this.#context !== null && this.#context.state !== "running";
  }

  get canChooseOutput() {
    return typeof AudioContext !== "undefined" && "setSinkId" in AudioContext.prototype;
  }

  /* Call it from a gesture. Resolves to the context once the worklets are there; it may still be locked. */
  async wake() {
    if (!this.#context) {
      let context = new AudioContext({ latencyHint: "interactive" });
      if (context.sampleRate < LOWEST_RATE || context.sampleRate > HIGHEST_RATE) {
        context.close();
        context = new AudioContext({ latencyHint: "interactive", sampleRate: USUAL_RATE });
      }
      this.#context = context;
      // Whoever is told may use the worklets.
      context.onstatechange = () => this.#loading.then(() => this.#tell());
      const worklets = ["capture-worklet.js", "playback-worklet.js"];
      this.#loading = Promise.all(worklets.map((name) => context.audioWorklet.addModule(new URL(name, import.meta.url))));
      // Browsers with only one kind of session at a time would silence the speaker while the microphone is open.
      if (navigator.audioSession) navigator.audioSession.type = "play-and-record";
    }
    if (this.locked) this.#context.resume().catch(() => {});
    await this.#loading;
    this.#tell();
    return this.#context;
  }

  /* After the page was away, or an output was unplugged. */
  revive() {
    if (this.locked) this.#context.resume().catch(() => {});
  }

  /* `deviceId` "" is the system's own choice. */
  async chooseOutput(deviceId) {
    if (this.#context && this.canChooseOutput && (this.#context.sinkId ?? "") !== deviceId) {
      await this.#context.setSinkId(deviceId);
    }
  }

  /* When something at a context's time is heard, on the clock of performance.now(). */
  heardAt(time) {
    const context = this.#context;
    const stamp = context.getOutputTimestamp?.();
    if (stamp?.performanceTime > 0) return stamp.performanceTime + (time - stamp.contextTime) * 1000;
    return performance.now() + (time - context.currentTime + (context.outputLatency || context.baseLatency || 0)) * 1000;
  }

  /* Samples that were given out and are on their way to the ear. */
  get latencySamples() {
    const context = this.#context;
    return Math.round((context.outputLatency || context.baseLatency || 0) * context.sampleRate);
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}
