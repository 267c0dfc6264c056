/* How the pages write times, and make elements. Without anything of the server's: a shared file has this within it. */

export const make = (tag, className = "", text = undefined) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

/* Milliseconds as one reads them: "340 ms", "1.2 s". */
export function duration(ms) {
  return ms < 999.5 ? `${Math.round(ms)}\u00a0ms` : `${(ms / 1000).toFixed(1)}\u00a0s`;
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
