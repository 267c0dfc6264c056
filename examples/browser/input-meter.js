/* How loud the microphone is, beside its choice in the settings. While they are open the microphone is, too, where the
   browser has let the page use it before; nothing of that is sent. */

export class InputMeter {
  #opened = false; // by the meter, and for nothing else

  constructor(meter, dialog, { sound, microphone, talk }) {
    Object.assign(this, { dialog, sound, microphone, talk });
    microphone.addEventListener("chunk", ({ detail: { peak } }) => {
      if (dialog.open) meter.value = Math.sqrt(peak);
    });
    dialog.addEventListener("close", () => {
      meter.value = 0;
      if (this.#opened && talk.phase === "off") microphone.close();
      this.#opened = false;
    });
  }

  /* The settings were opened, by a gesture. */
  async listen() {
    const { microphone, sound, talk } = this;
    const granted = await navigator.permissions?.query({ name: "microphone" }).catch(() => null); // not every browser tells
    if (granted?.state !== "granted" || microphone.isOpen) return;
    try {
      const context = await sound.wake();
      if (!this.dialog.open || talk.phase !== "off") return;
      await microphone.open(context, talk.devices);
      this.#opened = true;
      if (!this.dialog.open && talk.phase === "off") microphone.close();
    } catch {
      // The button to talk says why the microphone does not open.
    }
  }
}
