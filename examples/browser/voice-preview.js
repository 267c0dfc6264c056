/* The buttons beside the voices: say a sentence with the chosen one, by way of `/v1/audio/speech`. */

import { currentKey } from "./settings.js";

/* In the language of the voice, where there is one here. */
const SENTENCES = {
  de: "Guten Tag. So klinge ich.",
  en: "Hello. This is how I sound.",
  es: "Hola. Así es como sueno.",
  fr: "Bonjour. Voici ma voix.",
  it: "Ciao. Questa è la mia voce.",
  nl: "Hallo. Zo klink ik.",
  pl: "Dzień dobry. Tak brzmię.",
  pt: "Olá. É assim que eu soo.",
};

export class VoicePreview {
  #audio = null;
  #asked = null; // what ends the request

  /* `choice()` tells the voice and its language; `quiet(on)` keeps an open microphone from hearing it; `complain(error)` is
     given the server's error, or one of the browser. */
  constructor(buttons, url, { choice, quiet, speaker, complain }) {
    Object.assign(this, { buttons, url, choice, quiet, speaker, complain });
    for (const button of buttons) button.onclick = () => (this.#asked ? this.stop() : this.play());
  }

  /* A button says it with a word or with a picture. */
  #show(plays) {
    for (const button of this.buttons) {
      const picture = button.querySelector("use");
      if (picture) picture.setAttribute("href", plays ? "#i-stop" : "#i-play");
      else button.textContent = plays ? "Stop" : "Listen";
      button.setAttribute("aria-pressed", String(plays));
    }
  }

  async play() {
    const { voice, language = "en" } = this.choice();
    const asked = new AbortController();
    this.#asked = asked;
    this.#show(true);
    this.quiet(true);
    const ended = () => asked === this.#asked && this.stop();
    try {
      const sound = await this.#speech({ voice, language, signal: asked.signal });
      if (asked.signal.aborted) return;
      this.#audio = new Audio(URL.createObjectURL(sound));
      this.#audio.onended = this.#audio.onerror = ended;
      if (this.speaker()) await this.#audio.setSinkId?.(this.speaker()).catch(() => {}); // the system's own, then
      if (!asked.signal.aborted) await this.#audio.play();
    } catch (error) {
      if (asked.signal.aborted) return;
      this.complain(error);
      ended();
    }
  }

  stop() {
    if (!this.#asked) return;
    this.#asked.abort();
    this.#asked = null;
    if (this.#audio) {
      this.#audio.pause();
      URL.revokeObjectURL(this.#audio.src);
      this.#audio = null;
    }
    this.#show(false);
    this.quiet(false);
  }

  async #speech({ voice, language, signal }) {
    const key = currentKey();
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const input = SENTENCES[language.split("-")[0]] ?? SENTENCES.en;
    const body = JSON.stringify({ input, response_format: "wav", ...(voice ? { voice } : {}) });
    const answer = await fetch(this.url, { method: "POST", headers, body, signal });
    if (answer.ok) return answer.blob();
    throw (await answer.json().catch(() => null))?.error ?? { message: `status ${answer.status}` };
  }
}
