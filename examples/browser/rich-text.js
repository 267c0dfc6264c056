/* An answer's text as elements: paragraphs, headings, lists, tables, quotations, rules, code, emphasis, links. A part of
   Markdown, which is what models write; what is not understood stays as it is. Nothing is ever read as HTML, and no text takes
   longer than its length accounts for. */

const FENCE = /^\s*```\s*(\S*)/;
const HEADING = /^#{1,6}\s+(.*)/;
const QUOTE = /^\s*> ?/;
const RULE = /^(?:-{3,}|\*{3,}|_{3,})$/;
/* Its indent, its mark, its number, and what it says. */
const ITEM = /^(\s*)((?:[-*+]|(\d{1,9})[.)])\s+)(.*)/;
const DELIMITER = /^:?-+:?$/;
const INLINE =
  /`([^`]+)`|\*\*(\S(?:(?:(?!\*\*).)*?\S)?)\*\*(?!\*)|\*([^\s*](?:[^*]*?[^\s*])?)\*|\[([^[\]]+)\]\((https?:\/\/[^\s)]{1,2000})\)|(https?:\/\/[^\s<>()]*[^\s<>().,;:!?])/g;
/* Lists and quotations within one another; what lies deeper is shown as it is written. */
const MAX_DEPTH = 6;
const TAB_COLUMNS = 4;

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
  return blocksOfLines(text.split("\n"), 0);
}

function blocksOfLines(lines, depth) {
  const blocks = [];
  let start = 0;
  for (let place = 0; place < lines.length; ) {
    const [element, next] = blockAt(lines, place, depth);
    if (element) blocks.push({ element, start });
    for (; place < next && place < lines.length; place++) start += lines[place].length + 1;
  }
  return blocks;
}

function elementsOf(lines, depth) {
  return blocksOfLines(lines, depth).map(({ element }) => element);
}

function blockAt(lines, place, depth) {
  const line = lines[place];
  if (!line.trim()) return [null, place + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, place, fence[1]);
  const heading = HEADING.exec(line);
  if (heading) return [make("p", inline(heading[1]), "heading"), place + 1];
  if (isRule(line)) return [make("hr", []), place + 1];
  if (ITEM.test(line)) return list(lines, place, depth);
  if (QUOTE.test(line) && depth < MAX_DEPTH) return quotation(lines, place, depth);
  if (isTable(lines, place)) return table(lines, place);
  let end = place + 1;
  while (end < lines.length && lines[end].trim() && !opensBlock(lines, end, depth)) end++;
  return [make("p", inline(lines.slice(place, end).join("\n"))), end];
}

/* Whether the line ends the paragraph above it. */
function opensBlock(lines, place, depth) {
  const line = lines[place];
  const begins = [FENCE, HEADING, ITEM].some((pattern) => pattern.test(line)) || isRule(line);
  return begins || (QUOTE.test(line) && depth < MAX_DEPTH) || isTable(lines, place);
}

function isRule(line) {
  return RULE.test(line.replace(/\s+/g, ""));
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

function list(lines, place, depth) {
  const ordered = ITEM.exec(lines[place])[3] !== undefined;
  const items = [];
  for (let found; place < lines.length && (found = ITEM.exec(lines[place])) && !isRule(lines[place]); ) {
    const [, indent, mark, number, text] = found;
    if ((number !== undefined) !== ordered) break;
    const own = columns(indent);
    const end = depth < MAX_DEPTH ? endOfItem(lines, place + 1, own + 2) : place + 1;
    const within = lines.slice(place + 1, end).map((line) => dedented(line, own + mark.length));
    const item = make("li", [...inline(text), ...elementsOf(within, depth + 1)]);
    if (ordered) item.value = Number(number);
    items.push(item);
    place = end;
  }
  return [make(ordered ? "ol" : "ul", items), place];
}

/* Where the lines end that are indented as far as what belongs to an item; empty ones count where more follows. */
function endOfItem(lines, place, least) {
  let end = place;
  for (; place < lines.length; place++) {
    if (!lines[place].trim()) continue;
    if (columns(/^\s*/.exec(lines[place])[0]) < least) break;
    end = place + 1;
  }
  return end;
}

function columns(indent) {
  let count = 0;
  for (const space of indent) count += space === "\t" ? TAB_COLUMNS - (count % TAB_COLUMNS) : 1;
  return count;
}

/* The line without its indent, or that many columns of it. */
function dedented(line, most) {
  const indent = /^\s*/.exec(line)[0];
  return " ".repeat(Math.max(0, columns(indent) - most)) + line.slice(indent.length);
}

function quotation(lines, place, depth) {
  let end = place;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const within = lines.slice(place, end).map((line) => line.replace(QUOTE, ""));
  return [make("blockquote", elementsOf(within, depth + 1)), end];
}

/* A line of names above a line of as many dashes. */
function isTable(lines, place) {
  if (!lines[place].includes("|") || !lines[place + 1]?.includes("|")) return false;
  const delimiters = cellsOf(lines[place + 1]);
  if (delimiters.length === 0 || delimiters.some((cell) => !DELIMITER.test(cell))) return false;
  return delimiters.length === cellsOf(lines[place]).length;
}

/* A table wider than the page scrolls sideways. It takes the focus, so that the arrow keys scroll it, too. */
function table(lines, place) {
  const sides = cellsOf(lines[place + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (line, tag) => {
    const cells = cellsOf(line).slice(0, sides.length); // fewer stay fewer: rows times columns may be more than the text
    return make("tr", cells.map((text, column) => cell(tag, text, sides[column])));
  };
  const rows = [];
  let end = place + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(row(lines[end], "td"));
  const head = make("thead", [row(lines[place], "th")]);
  const box = make("div", [make("table", [head, make("tbody", rows)])], "table");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table");
  return [box, end];
}

function cell(tag, text, side) {
  const node = make(tag, inline(text));
  if (tag === "th") node.scope = "col";
  if (side) node.style.textAlign = side;
  return node;
}

/* The cells of a row: bars part them, except one behind a backslash. */
function cellsOf(line) {
  const cells = line.trim().split(/(?<!\\)\|/);
  if (cells[0].trim() === "") cells.shift();
  if (cells.at(-1)?.trim() === "") cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
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

/* A link that opens beside the page. */
export function link(label, target) {
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
