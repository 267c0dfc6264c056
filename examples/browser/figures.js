/* Who works, and how fast it all is: two figures beside the conversation, the rest in the drawer. */

import { element } from "./page.js";
import { duration } from "./calls/shown.js";
import { NO_MODEL, abilities, brief, lacking, places, sentence, workers } from "./who.js";

export class Figures {
  /* What is saved with a conversation. */
  told = { model: null, parts: null, session_id: null, connection: null, round_trip_ms: null, first_sound_ms: [], underruns: 0 };

  #sound = { queuedMs: 0, underruns: 0, targetMs: 60 };

  /* `way` is that of the connection. */
  server(created, way) {
    const { model, parts, advice, session_id: sessionId } = created;
    Object.assign(this.told, { model, parts, session_id: sessionId, connection: way });
    show("figure-connection", way);
    show("way", way === "WebRTC" ? way : "network");
    show("figure-model", model);
    show("figure-session", sessionId);
    for (const [verb, name] of Object.entries(workers(created))) show(`figure-${verb}`, name ?? "–");
    show("who", sentence(created));
    show("parts", brief(created));
    element("open-who").hidden = brief(created) === "";
    const told = { heard: "Hears you", answered: "Answers", spoken: "Speaks" };
    const rows = Object.entries(workers(created)).filter(([, name]) => name !== null);
    element("who-parts").replaceChildren(...rows.flatMap(([verb, name]) => [item("dt", told[verb]), item("dd", partOf(created, verb, name))]));
    show("where", places(created, location.hostname));
    show("who-places", places(created, location.hostname));
    element("who-abilities").replaceChildren(
      ...abilities(created).map(([can, what]) => item("li", can ? `It can ${what}.` : `It cannot ${what}.`, can ? "can" : "cannot")),
    );
    const lacks = lacking(created, location.hostname);
    element("lacks").hidden = lacks.length === 0;
    element("lacking").replaceChildren(...lacks.map((what) => item("li", what, what === NO_MODEL ? "no-model" : "")));
    element("who-advice").hidden = !advice;
    const saysSo = advice?.startsWith("rules");
    const rules = parts?.llm?.name === "rules" && !saysSo ? "Rules answer here, and no language model. " : "";
    show("who-advice", advice ? rules + advice : "");
    show("advice", advice ?? "");
  }

  firstSound(ms) {
    this.told.first_sound_ms.push(Math.round(ms));
    show("first-sound", duration(ms));
    element("first-sound").parentElement.hidden = false;
  }

  network(ms) {
    this.told.round_trip_ms = Math.round(ms * 10) / 10;
    show("round-trip", ms < 10 ? `${ms.toFixed(1)}\u00a0ms` : duration(ms));
    element("round-trip").parentElement.hidden = false;
  }

  /* Without a connection the last round trip tells nothing. */
  offline() {
    element("round-trip").parentElement.hidden = true;
  }

  /* `cancelled` is null while there is no microphone. */
  echo(cancelled) {
    show("figure-echo", cancelled === null ? "–" : cancelled ? "taken out" : "not taken out");
  }

  /* Comes fifty times a second, and is shown with what waits to be sent. */
  playing(sound) {
    this.told.underruns = sound.underruns;
    this.#sound = sound;
  }

  waiting(chunks, bytes) {
    const { queuedMs, underruns, targetMs } = this.#sound;
    show("figure-queue", duration(queuedMs));
    show("figure-underruns", String(underruns));
    show("figure-target", duration(targetMs));
    show("figure-unacknowledged", `${chunks} chunks`);
    show("figure-buffered", `${Math.ceil(bytes / 1024)} KiB`);
  }
}

/* A part by its name and its model, where they differ. */
function partOf({ parts }, verb, name) {
  const part = parts?.[{ heard: "asr", answered: "llm", spoken: "tts" }[verb]];
  return part && part.model !== name ? `${name}, ${part.model}` : name;
}

function item(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
}

function show(id, text) {
  const node = element(id);
  if (node.textContent !== text) node.textContent = text;
}
