/* The script of a shared conversation: it shows and plays what the file has, and asks for nothing else. */

import { element } from "../page.js";
import { Player, bindPanes } from "./player.js";
import { clock, day, make } from "./shown.js";
import { turnFall } from "./waterfall.js";

const call = JSON.parse(element("call").textContent);

const player = new Player({
  chosen: (turn, place) => {
    element("turn-title").textContent = `Turn ${place + 1} of ${call.turns.length}`;
    element("turn-fall").replaceChildren(turnFall(turn.spans));
  },
});

function whose({ turns, voice, peaks }) {
  if (!peaks) return "This file has the words of a person and of a speech server, and no sound.";
  const person = turns.some(({ user }) => user?.end_ms > user?.start_ms);
  const name = voice ? ` “${voice}”` : "";
  return `Whose voice is inside: ${person ? "that of the person who talked (User), recorded; and " : ""}a voice${name} made by a computer (Server).`;
}

function show() {
  const { started, duration_ms: length, turns, left_out: leftOut, peaks } = call;
  element("about").textContent = [day(started), clock(length)].join(" · ");
  document.title = `Conversation of ${day(started)}`;
  element("whose").textContent = whose(call);
  element("left-out").append(...leftOut.map((text) => make("li", "", text)));
  element("player").hidden = !peaks;
  player.show(turns, length);
  if (peaks) player.wave.peaks(peaks);
}

player.sound.addEventListener("error", () => {
  element("left-out").append(make("li", "", "This browser cannot play the sound (Opus in Ogg); a newer one can."));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
bindPanes();
if (call) show();
