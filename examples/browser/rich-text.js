/* An answer's text as elements: paragraphs, headings, lists, code, emphasis, links. A small part of Markdown, which is what
   models write; what is not understood stays as it is. Nothing is ever read as HTML. */

const FENCE = /^\s*```\s*(\S*)/;
const HEADING = /^#{1,6}\s+(.*)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)/;
const INLINE = /`([^`]+)`|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]*[^\s<>().,;:!?])/g;

const shown = new WeakMap();

/* Show a text in `node`. Of one that grows, only the last two blocks are read again: a line that is not complete yet may
   still join the block before it. */
export function showRichText(node, text) {
  const before = shown.get(node) ?? { text: "", blocks: [] };
  if (before.text === text) return;
  const grows = text.startsWith(before.text);
  const kept = grows ? before.blocks.slice(0, -2) : [];
  const start = (grows && before.blocks.at(-2)?.start) || 0;
  const blocks = blocksOf(text.slice(start)).map((block) => ({ ...block, start: start + block.start }));
  for (const { element } of before.blocks.slice(kept.length)) element.remove();
  node.append(...blocks.map(({ element }) => element));
  shown.set(node, { text, blocks: [...kept, ...blocks] });
}

/* The elements of a text, each with the place in it where its first line starts. */
export function blocksOf(text) {
  const blocks = [];
  const lines = text.split("\n");
  let start = 0;
  for (let place = 0; place < lines.length; ) {
    const [element, next] = blockAt(lines, place);
    if (element) blocks.push({ element, start });
    for (; place < next && place < lines.length; place++) start += lines[place].length + 1;
  }
  return blocks;
}

function blockAt(lines, place) {
  const line = lines[place];
  if (!line.trim()) return [null, place + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, place, fence[1]);
  const heading = HEADING.exec(line);
  if (heading) return [make("p", inline(heading[1]), "heading"), place + 1];
  if (ITEM.test(line)) return list(lines, place);
  let end = place + 1;
  while (end < lines.length && lines[end].trim() && !FENCE.test(lines[end]) && !HEADING.test(lines[end]) && !ITEM.test(lines[end])) end++;
  return [make("p", inline(lines.slice(place, end).join("\n"))), end];
}

/* Code that has no end yet goes to the end of what there is. */
function code(lines, place, language) {
  let end = place + 1;
  while (end < lines.length && !FENCE.test(lines[end])) end++;
  const block = make("pre", [make("code", [lines.slice(place + 1, end).join("\n")])]);
  block.tabIndex = 0;
  if (language) block.dataset.language = language;
  return [block, end + 1];
}

function list(lines, place) {
  const [, number] = ITEM.exec(lines[place]);
  const items = [];
  for (; place < lines.length && ITEM.test(lines[place]); place++) items.push(make("li", inline(ITEM.exec(lines[place])[2])));
  const block = make(number ? "ol" : "ul", items);
  if (number) block.start = Number(number);
  return [block, place];
}

function inline(text) {
  const parts = [];
  let after = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, source, strong, soft, label, target, address] = found;
    parts.push(text.slice(after, found.index));
    after = found.index + whole.length;
    if (source !== undefined) parts.push(make("code", [source]));
    else if (strong !== undefined) parts.push(make("strong", inline(strong)));
    else if (soft !== undefined) parts.push(make("em", inline(soft)));
    else parts.push(link(label ?? address, target ?? address));
  }
  return [...parts, text.slice(after)].filter((part) => part !== "");
}

function link(label, target) {
  const anchor = make("a", [label]);
  anchor.href = target;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer";
  return anchor;
}

function make(tag, children, className = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}
