/* What the widget uses of the orb. */

export type Look = "away" | "ready" | "listening" | "hearing" | "busy" | "speaking" | "ducked" | "muted";

/* Its colours are the custom properties --you, --server, --busy, --rest, --orb-light, --orb-deep, --paper and --bad of the
   canvas, as #rrggbb. */
export class Orb {
  constructor(canvas: HTMLCanvasElement);
  show(state: Look): void;
  interrupt(): void;
  add(side: "you" | "server", peak: number): void;
  repaint(): void;
}
