/* Hands: the talk button under a finger, the keyboard, and what each key does.

   Space   talk: hold it, or tap it; with an open microphone it opens and closes it
   Escape  stop the answer            M  mute            /  write            L  open and close the log */

const TYPING = "input, textarea, select, [contenteditable]";
const OTHER_CONTROLS = `${TYPING}, button:not(#talk), a, summary, label`;

export function bindTalkButton(button, talk) {
  button.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    button.setPointerCapture(event.pointerId);
    talk.press(event.timeStamp);
  });
  button.addEventListener("pointerup", (event) => talk.release(event.timeStamp));
  button.addEventListener("pointercancel", (event) => talk.release(event.timeStamp));
  button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long press on a phone
  // Keyboards and screen readers click without a pointer: each click is a tap.
  button.addEventListener("click", (event) => {
    if (event.detail !== 0) return;
    talk.press(event.timeStamp);
    talk.release(event.timeStamp);
  });
}

export function bindKeyboard({ talk, stop, mute, write, log }) {
  let held = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return stop();
    if (event.target.closest(event.code === "Space" ? OTHER_CONTROLS : TYPING)) return;
    if (event.code === "Space") {
      event.preventDefault();
      if (event.repeat || held) return;
      held = true;
      talk.press(event.timeStamp);
    } else if (event.key === "m" || event.key === "M") {
      mute();
    } else if (event.key === "l" || event.key === "L") {
      log();
    } else if (event.key === "/") {
      event.preventDefault();
      write();
    }
  });
  document.addEventListener("keyup", (event) => {
    if (event.code !== "Space" || !held) return;
    event.preventDefault();
    held = false;
    talk.release(event.timeStamp);
  });
  window.addEventListener("blur", (event) => {
    if (!held) return;
    held = false;
    talk.release(event.timeStamp);
  });
}
