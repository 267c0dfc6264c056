/* The look of the widget. A page changes it by the custom properties --voice-chat-*, by ::part() and by `color-scheme`. */

export const STYLE = `
:host {
  --sheet: var(--voice-chat-paper, light-dark(#fff, #1a2025));
  --ink: var(--voice-chat-ink, light-dark(#1b2227, #e7ebed));
  --faint: var(--voice-chat-faint, light-dark(#5d6870, #97a3ab));
  --line: var(--voice-chat-line, light-dark(#e4e1db, #36414a));
  --voice: var(--voice-chat-you, light-dark(#0b7285, #4cc3d5));
  --voice-ink: var(--voice-chat-you-ink, light-dark(#fff, #04222a));
  --answer: var(--voice-chat-server, light-dark(#5d5fe0, #8583ff));
  --mark: var(--voice-chat-mark, light-dark(#d9d9fb, #3d3c7d));
  --work: var(--voice-chat-busy, light-dark(#3f86dd, #5ea4f6));
  --wrong: var(--voice-chat-bad, light-dark(#b3261e, #ff9087));
  --still: var(--voice-chat-rest, light-dark(#a3b4c8, #5a6b84));
  display: block; box-sizing: border-box; max-width: 26rem; padding: 1rem; border: 1px solid var(--line);
  border-radius: var(--voice-chat-radius, 16px); background: var(--sheet); color: var(--ink);
  font: var(--voice-chat-font, 1rem/1.45 system-ui, sans-serif);
}
:host([hidden]), [hidden] { display: none !important; }
* { box-sizing: border-box; }
.orb { position: relative; height: var(--voice-chat-orb-height, 9rem); }
p { margin: 0; overflow-wrap: anywhere; }
.state { min-height: 1.45em; text-align: center; font-weight: 600; }
.log { max-height: var(--voice-chat-log-height, 14rem); margin-block: .75rem; padding: .25rem; overflow-y: auto; overscroll-behavior: contain; scrollbar-width: thin; }
.log p { width: fit-content; max-width: 90%; margin-bottom: .6rem; white-space: pre-line; }
.you { margin-inline-start: auto; padding: .4rem .8rem; border-radius: 14px 14px 4px 14px; background: color-mix(in srgb, var(--voice) 14%, var(--sheet)); }
.server { padding-inline-start: .7rem; border-inline-start: 3px solid var(--answer); }
.server.failed { border-color: var(--wrong); }
.interim { font-style: italic; }
.error { margin-block: .5rem .75rem; padding: .5rem .75rem; border: 1px solid var(--wrong); border-radius: 10px; font-size: .9rem; }
.row { display: flex; gap: .5rem; margin-top: .5rem; }
.controls { margin-top: .75rem; }
button, input { min-height: 44px; border: 1px solid var(--faint); border-radius: 999px; background: none; font: inherit; color: inherit; }
button { padding: .4rem 1.1rem; cursor: pointer; }
button:disabled { border-color: var(--line); color: var(--faint); cursor: default; }
.talk { flex: 1; font-weight: 600; }
.talk:enabled { border-color: var(--voice); background: var(--voice); color: var(--voice-ink); }
.mute[aria-pressed="true"] { border-color: var(--wrong); color: var(--wrong); }
input { flex: 1; min-width: 0; padding: .4rem 1rem; }
input::placeholder { color: var(--faint); opacity: 1; }
:focus-visible { outline: 2px solid var(--voice); outline-offset: 2px; }
.for-readers { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
::highlight(spoken) { background-color: var(--mark); color: var(--ink); }
`;
