/* Light or dark, as the person chose, or else as the system has it. The event "themechange" of the window tells that colours
   are other ones. */

import { loadSettings } from "./settings.js";

const tell = () => dispatchEvent(new Event("themechange"));

/* `theme` is system, light or dark. */
export function showTheme(theme) {
  const media = (scheme) => (theme === "system" ? `(prefers-color-scheme: ${scheme})` : theme === scheme ? "all" : "not all");
  for (const node of document.querySelectorAll("[data-scheme]")) node.setAttribute("media", media(node.dataset.scheme));
  document.querySelector("meta[name=color-scheme]").content = theme === "system" ? "light dark" : theme;
  tell();
}

// The sheet of the dark colours may arrive after they hold.
document.querySelector("link[data-scheme]").addEventListener("load", tell);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
showTheme(loadSettings().theme);
