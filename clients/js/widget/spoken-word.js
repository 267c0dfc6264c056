/* Which word of an answer sounds, and where an answer was cut, marked in its text. The places of words in the text are
   found by their order; browsers without the Custom Highlight API show the text as it is. */

const CAN = "highlights" in (globalThis.CSS ?? {}) && typeof Highlight !== "undefined";

/* The range of the characters [from, to) of an element's text. */
export function rangeOf(node, from, to) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  let place = 0;
  let begun = false;
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const end = place + text.data.length;
    if (!begun && from < end) {
      range.setStart(text, Math.max(0, from - place));
      begun = true;
    }
    if (begun && to <= end) {
      range.setEnd(text, to - place);
      return range;
    }
    place = end;
  }
  return null;
}

/* Where each of the words stands in a text: [from, to), or null where it is not in it. */
export function placesOf(words, text) {
  let after = 0;
  return words.map(({ text: word }) => {
    const from = text.indexOf(word.trim(), after);
    if (from < 0 || word.trim() === "") return null;
    after = from + word.trim().length;
    return [from, after];
  });
}

const spoken = new Map();

/* Mark, in an element with the text of an answer, what sounds at `ms`; `ms` undefined marks nothing there. The range of the
   word, or null. It is called for each piece of sound: while the word stays the same, nothing is painted anew. */
export function markSpoken(node, words, ms) {
  if (!CAN) return null;
  const range = ms === undefined ? null : wordAt(node, words, ms);
  if (isSame(spoken.get(node) ?? null, range)) return range;
  spoken.delete(node);
  if (range) spoken.set(node, range);
  if (spoken.size) CSS.highlights.set("spoken", new Highlight(...spoken.values()));
  else CSS.highlights.delete("spoken");
  return range;
}

function isSame(before, range) {
  const edges = ["startContainer", "startOffset", "endContainer", "endOffset"];
  return before === range || Boolean(before && range && edges.every((edge) => before[edge] === range[edge]));
}

function wordAt(node, words, ms) {
  const found = words.findLastIndex((word) => word.start_ms <= ms);
  if (found < 0 || words[found].end_ms + 250 < ms) return null;
  const place = placesOf(words.slice(0, found + 1), node.textContent).at(-1);
  return place ? rangeOf(node, ...place) : null;
}

const unheard = new Map();
const cuts = new Map();

/* Fade what of a cut answer was not heard, and mark the last word that was. */
export function markUnheard(node, words, heardMs) {
  if (!CAN) return;
  unheard.delete(node);
  cuts.delete(node);
  if (heardMs !== null && words.length) {
    const heard = words.filter((word) => word.start_ms < heardMs);
    if (heard.length === words.length) return showUnheard();
    const last = placesOf(heard, node.textContent).findLast((place) => place);
    const range = rangeOf(node, last?.[1] ?? 0, node.textContent.length);
    if (range) unheard.set(node, range);
    if (range && last) cuts.set(node, rangeOf(node, ...last));
  }
  showUnheard();
}

function showUnheard() {
  CSS.highlights.set("unheard", new Highlight(...unheard.values()));
  CSS.highlights.set("cut", new Highlight(...cuts.values()));
}
