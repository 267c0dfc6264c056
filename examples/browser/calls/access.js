/* How the pages of calls get at what they show: with the key that was entered in this tab, and a question for it where the
   server wants one. */

import { element } from "../page.js";
import { currentKey, setKey } from "../settings.js";

export const make = (tag, className = "", text = undefined) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

/* A response with status 200, 206 or so. Raises an Error with the server's sentence. */
export async function ask(address, { headers = {}, ...options } = {}) {
  for (;;) {
    const key = currentKey();
    const response = await fetch(address, { ...options, headers: { ...headers, ...(key && { Authorization: `Bearer ${key}` }) } });
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    const sentence = told?.error?.message ?? `The server responded with status ${response.status}.`;
    if (response.status !== 401 && !(response.status === 403 && key)) throw new Error(sentence);
    await keyFor(key ? sentence : "", sentence);
  }
}

export const askJson = async (address, options) => (await ask(address, options)).json();

/* Ask for a key; `problem` is what is wrong with the last one. Raises an Error, with the server's reason, where the person
   has none. */
function keyFor(problem, reason) {
  const dialog = element("key-dialog");
  element("key-problem").textContent = problem;
  element("close-key").onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
  return new Promise((done, failed) => {
    element("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(element("key").value.trim());
      dialog.onclose = null;
      dialog.close();
      done();
    };
    dialog.onclose = () => failed(new Error(`Recorded calls are shown only to operators: ${reason}`));
  });
}

/* "0:07", "12:34", "1:02:03". */
export function clock(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
}

/* A moment as one writes it here: "28 Nov 2026, 10:31". */
export function day(started) {
  const date = new Date(started);
  return Number.isNaN(date.valueOf()) ? String(started) : date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}
