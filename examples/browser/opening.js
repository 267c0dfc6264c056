/* How the page opens: the installed app (?listen) with the microphone, its shortcut (?write) with the line to write in. */

/* So long a browser has to let sound begin. */
const PROBE_MS = 1000;

/* A page of elsewhere can lead here with ?listen, so in a tab it takes a press of a button, and so it does where the browser
   would ask for the microphone, or lets nothing sound before a touch. */
export async function openAsAsked({ messages, listens, press, write }) {
  const asked = new URLSearchParams(location.search);
  if (asked.has("write")) return write();
  if (!asked.has("listen") || !listens) return;
  const isApp = matchMedia("(display-mode: standalone)").matches || navigator.standalone === true;
  if (isApp && (await isGranted()) && (await maySound())) return press();
  const text = "The microphone opens when you press the button.";
  const action = () => {
    messages.hide("listen");
    press();
  };
  messages.show("listen", text, { kind: "plain", label: "Start talking", action });
}

async function isGranted() {
  try {
    return (await navigator.permissions.query({ name: "microphone" })).state === "granted";
  } catch {
    return false; // a browser that does not say
  }
}

async function maySound() {
  const probe = new AudioContext();
  const late = new Promise((done) => setTimeout(() => done(false), PROBE_MS));
  try {
    return await Promise.race([probe.resume().then(() => true), late]);
  } finally {
    probe.close();
  }
}
