/* What the widget uses of the orb. */

export type Look = "away" | "ready" | "opening" | "listening" | "hearing" | "busy" | "speaking" | "ducked" | "muted";

/* It fills an element. Its colours are the custom properties --orb-you, --orb-server, --orb-work, --orb-rest, --orb-light,
   --orb-deep, --paper and --bad of that, as #rrggbb. */
export class Orb {
  constructor(host: HTMLElement);
  /* Call it once; it follows the page's looks until the signal. */
  watch(signal?: AbortSignal): void;
  show(state: Look): void;
  interrupt(): void;
  add(side: "you" | "server", peak: number): void;
  repaint(): void;
}
