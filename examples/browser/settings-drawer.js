/* The drawer: everything that one sets once, in groups, and the figures of the connection. Each field of the form has the
   name of its setting. */

import { duration } from "./calls/shown.js";
import { bindDialog, element } from "./page.js";
import { languageName, voiceName } from "./plain-words.js";
import { judgesTurns } from "./settings.js";
import { settingOf, TOOLS } from "./tools.js";

/* Settings that mean nothing where the server takes no speech. */
const MICROPHONE = ["microphone", "echoCancellation", "noiseSuppression", "autoGainControl"];

export class SettingsDrawer {
  #form = element("settings-form");
  #twins = [...document.querySelectorAll("[data-setting]")]; // choices that stand elsewhere, too
  #capabilities = null;

  /* Calls `changed(names)` with the settings whose values changed, and `opened()` when the drawer opens. */
  constructor(settings, { changed, opened }) {
    this.settings = settings;
    bindDialog(element("settings"), {
      opener: element("open-settings"),
      closer: element("close-settings"),
      opened: () => {
        this.listDevices();
        opened();
      },
    });
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    const choose = (name, value) => {
      settings[name] = value;
      this.#fill();
      this.#showTurns();
      changed([name]);
    };
    this.#form.addEventListener("change", ({ target }) => choose(target.name, valueOf(target)));
    for (const twin of this.#twins) twin.addEventListener("change", () => choose(twin.dataset.setting, twin.value));
    navigator.mediaDevices?.addEventListener("devicechange", () => this.listDevices());
    element("tools").append(...Object.entries(TOOLS).map(([name, { label }]) => makeSwitch(settingOf(name), label)));
    this.#fill();
  }

  /* What this server and its engine have to choose from. */
  offer(capabilities, { models, speakerChoice, calls }) {
    const { voices, voice_languages: languages = {}, languages: heard = [], tasks } = capabilities;
    this.#capabilities = capabilities;
    const named = voices.map((voice) => [voice, voiceName(voice, languages[voice])]);
    const chosen = named.length ? `Default: ${named[0][1]}` : "";
    const sorted = [...named].sort(([, one], [, other]) => one.localeCompare(other));
    this.#choices("voice", [["", chosen], ...(voices.length > 1 ? sorted : [])]);
    const spoken = heard.map((language) => [language, languageName(language)]);
    spoken.sort(([, one], [, other]) => one.localeCompare(other));
    this.#choices("language", [["", "Any language: tell by the sound"], ...spoken]);
    this.#choices("model", [["", "Server default"], ...models.map((model) => [model, model])]);
    const does = { chat: "Conversation", speech: "Read my text aloud", transcribe: "Write down what I say" };
    this.#choices("task", tasks.map((task) => [task, does[task] ?? task]));
    this.#form.elements.voice.closest(".with-button").hidden = voices.length === 0;
    element("voice-choice").hidden = voices.length < 2;
    element("hear-voice").hidden = voices.length === 0;
    element("language-choice").hidden = heard.length < 2;
    this.#row("model", models.length > 1 && !calls);
    this.#row("language", heard.length > 1);
    this.#row("task", tasks.length > 1);
    this.#row("answerWith", capabilities.output_modalities.includes("audio"));
    const hears = capabilities.input_modalities.includes("audio");
    for (const name of MICROPHONE) this.#row(name, hears);
    element("input-level").hidden = !hears;
    this.#row("speaker", speakerChoice);
    this.#row("connection", capabilities.webrtc ?? false);
    this.#row("startPolicy", !calls);
    this.#row("keywords", capabilities.keywords ?? false);
    this.#row("lexicon", (capabilities.lexicon ?? false) && !calls);
    element("tools").hidden = !capabilities.tools;
    this.#fill();
    this.#showTurns();
  }

  /* Names of devices are told only to pages that were let use them. */
  async listDevices() {
    const devices = (await navigator.mediaDevices?.enumerateDevices?.()) ?? [];
    for (const [name, kind] of [["microphone", "audioinput"], ["speaker", "audiooutput"]]) {
      const found = devices.filter((one) => one.kind === kind && one.deviceId && one.deviceId !== "default");
      const options = found.map((one, place) => [one.deviceId, one.label || `Device ${place + 1}`]);
      this.#choices(name, [["", "System default"], ...options]);
      this.#form.elements[name].value = this.settings[name];
      if (this.#form.elements[name].selectedIndex < 0) this.#form.elements[name].value = "";
    }
  }

  /* What there is to set about turns: it depends on the server, and on how they end. */
  #showTurns() {
    if (!this.#capabilities) return;
    const detects = this.#capabilities.turn_detection;
    const judges = detects && judgesTurns(this.#capabilities);
    this.#row("sensitivity", detects);
    this.#row("turns", judges);
    this.#row("overShortWords", detects);
    this.#row("murmurs", judges && this.#capabilities.backchannel && this.settings.turns !== "silence");
    this.#row("silenceMs", detects && (!judges || this.settings.turns === "silence"));
  }

  #choices(name, options) {
    for (const select of [this.#form.elements[name], ...this.#twins.filter(({ dataset }) => dataset.setting === name)]) {
      select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
    }
  }

  #row(name, shown) {
    this.#form.elements[name].closest("label").hidden = !shown;
  }

  #fill() {
    for (const [name, value] of Object.entries(this.settings)) {
      const field = this.#form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
    }
    for (const twin of this.#twins) twin.value = this.#form.elements[twin.dataset.setting].value;
    this.#showNumbers();
  }

  #showNumbers() {
    for (const output of this.#form.querySelectorAll("output")) {
      const field = this.#form.elements[output.htmlFor.value];
      output.textContent = field.name === "silenceMs" ? duration(Number(field.value)) : `${field.value}\u00a0%`;
    }
  }
}

function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  return field.type === "range" ? Number(field.value) : field.value;
}

function makeSwitch(name, label) {
  const row = document.createElement("label");
  row.className = "check";
  row.append(Object.assign(document.createElement("input"), { type: "checkbox", name }), label);
  return row;
}
