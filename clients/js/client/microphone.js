/* The microphone: 20 ms of samples at a time, in a long silence 100. Events:

   chunk   { samples (Int16Array), peak (0 to 1), capturedAt (performance.now() at its end) }
   lost    the device went away, or another program took it */

/** @import { MicrophoneChoice, MicrophoneEvents, Telling } from "../client.js" */

export class Microphone extends /** @type {Telling<MicrophoneEvents>} */ (EventTarget) {
  /** @type {MediaStream | null} */
  #stream = null;
  /** @type {AudioNode[]} */
  #nodes = [];
  #changes = 0; // how often it was opened or closed

  get isOpen() {
    return this.#stream !== null;
  }

  /* Null while it is closed. */
  get track() {
    return this.#stream?.getAudioTracks()[0] ?? null;
  }

  /* What the browser really gave: deviceId, echoCancellation and so on. */
  /** @returns {MediaTrackSettings} */
  get settings() {
    return this.track?.getSettings() ?? {};
  }

  /* Whether the browser takes what its speaker plays out of what the microphone hears; null while it is closed. Some
     browsers and devices give a microphone without that, whatever was asked for. */
  get cancelsEcho() {
    return this.isOpen ? Boolean(this.settings.echoCancellation) : null;
  }

  /* Raises the DOMException of getUserMedia, or an Error named InsecureContext where a page may not ask at all. It stays
     closed where it was closed, or opened anew, while the browser asked the person. */
  /** @param {AudioContext} context @param {MicrophoneChoice} choice */
  async open(context, { deviceId = "", echoCancellation = true, noiseSuppression = true, autoGainControl = true }) {
    this.close();
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new DOMException("this page may not use a microphone", "InsecureContext");
    }
    /** @type {MediaTrackConstraints} */
    const wanted = { channelCount: 1, echoCancellation, noiseSuppression, autoGainControl };
    // A device that is not there any more is no reason to stay silent: any other will do.
    if (deviceId) wanted.deviceId = { ideal: deviceId };
    const change = this.#changes;
    const stream = await navigator.mediaDevices.getUserMedia({ audio: wanted });
    if (change !== this.#changes) {
      for (const track of stream.getTracks()) track.stop();
      return;
    }
    this.#stream = stream;
    const [track] = stream.getAudioTracks();
    track.onended = () => {
      this.close();
      this.dispatchEvent(new Event("lost"));
    };
    const source = new MediaStreamAudioSourceNode(context, { mediaStream: stream });
    const capture = new AudioWorkletNode(context, "capture", { numberOfInputs: 1, numberOfOutputs: 0 });
    capture.port.onmessage = ({ data }) => {
      this.dispatchEvent(new CustomEvent("chunk", { detail: { ...data, capturedAt: performance.now() } }));
    };
    source.connect(capture);
    this.#nodes = [source, capture];
  }

  /* A muted microphone gives silence, so that the server's clock goes on. */
  /** @param {boolean} muted */
  set muted(muted) {
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  close() {
    this.#changes += 1;
    for (const node of this.#nodes) {
      node.disconnect();
      if (!(node instanceof AudioWorkletNode)) continue;
      node.port.onmessage = null;
      node.port.postMessage("closed");
    }
    for (const track of this.#stream?.getTracks() ?? []) {
      track.onended = null;
      track.stop();
    }
    this.#nodes = [];
    this.#stream = null;
  }
}
