/* What can be tried with this server, before the first word: questions that its mind can answer, and what its eyes and its
   tools are good for. */

import { seen } from "./who.js";

const MOST = 4;
const OF_RULES = ["What time is it?", "Count to twenty.", "What is three plus four?", "Who was Marie Curie?"];
const OF_A_MIND = [
  "Tell me something surprising about the sea.",
  "Help me plan a quiet weekend.",
  "Explain how a rainbow comes about.",
  "Let us play twenty questions.",
];
const OF_TOOLS = "What time is it in Tokyo?";

/* Each is { label, say } or { label, press }: what is asked, or the button that is pressed. */
export function suggestions(created) {
  const { parts, capabilities } = created;
  if (capabilities.tasks && !capabilities.tasks.includes("chat")) return [];
  const hasMind = Boolean(parts?.llm) && parts.llm.name !== "rules";
  const found = [];
  if (seen(created).length) found.push({ label: "Look at something with me", press: "camera" });
  if (hasMind && capabilities.tools) found.push({ label: OF_TOOLS, say: OF_TOOLS });
  for (const say of hasMind ? OF_A_MIND : OF_RULES) found.push({ label: say, say });
  return found.slice(0, MOST);
}

/* Show them as buttons; `ask(text)` asks, and `press(id)` presses another button. */
export function showSuggestions(place, created, { ask, press }) {
  const found = suggestions(created);
  const told = JSON.stringify(found);
  if (place.dataset.source === told) return;
  place.dataset.source = told;
  place.replaceChildren(
    ...found.map(({ label, say, press: id }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      if (say) button.dataset.say = say;
      button.onclick = () => (say ? ask(say) : press(id));
      return button;
    }),
  );
}
