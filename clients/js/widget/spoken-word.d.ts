/* What the widget and the hook for React use of it. */

import { Word } from "../client.js";

export function placesOf(words: readonly Word[], text: string): ([number, number] | null)[];
export function rangeOf(node: Node, from: number, to: number): Range | null;
