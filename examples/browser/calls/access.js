/* How the pages of calls get at what they show: with the key that was entered in this tab, and a question for it where the
   server wants one. */

import { element } from "../page.js";
import { currentKey, setKey } from "../settings.js";

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
