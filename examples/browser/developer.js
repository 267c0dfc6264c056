/* The panel for developers: how long each step of a turn took, how loud both sides are, how the sound arrives, the frames on
   the wire, and the lines that make the same request elsewhere. */

import { duration } from "./calls/shown.js";
import { shownTime, spansOf, strip, waterfall } from "./calls/waterfall.js";
import { Levels } from "./levels.js";
import { element } from "./page.js";

const KEPT_FRAMES = 500;
const SHOWN_FRAMES = 150;
const SHOWN_TURNS = 6;

export class Developer {
  #frames = [];
  #lines = new WeakMap(); // of each frame that was shown
  #falls = new WeakMap(); // of each turn
  #newest = null; // the turn whose waterfall opened by itself
  #client;
  #stale = false;
  #sound = { queuedMs: 0, underruns: 0, targetMs: 0 };
  #rtt = null;

  /* `key()` tells whether a key is needed; `copy(text, done)` puts text on the clipboard. */
  constructor(client, { hasKey, copy }) {
    this.#client = client;
    this.hasKey = hasKey;
    this.panel = element("developer");
    this.filter = element("wire-filter");
    client.session.onwire = (direction, frame) => this.#note(direction, frame);
    this.levels = new Levels(element("levels"));
    client.talk.addEventListener("level", ({ detail }) => this.levels.add("you", detail.peak));
    client.speaker.addEventListener("level", ({ detail }) => {
      this.#sound = detail;
      this.levels.add("server", detail.peak);
    });
    client.session.addEventListener("rtt", ({ detail }) => (this.#rtt = detail));
    client.addEventListener("turn", () => this.#later());
    element("open-developer").onclick = () => this.toggle(this.panel.hidden);
    element("close-developer").onclick = () => this.close();
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // elsewhere it stops the answer
      if (event.target !== this.filter || !this.filter.value) this.close(); // what is written there goes first
    });
    this.filter.oninput = () => this.#later();
    element("wire-copy").onclick = () => copy(JSON.stringify(this.#matching(), null, 2), "The frames were copied.");
    element("wire-clear").onclick = () => {
      this.#frames = [];
      this.#later();
    };
    element("request-language").onchange = () => this.#later();
    element("request-copy").onclick = () => copy(element("request").textContent, "The lines were copied.");
  }

  close() {
    if (!this.panel.hidden) this.toggle(false);
  }

  toggle(open) {
    const { activeElement: focused } = document;
    const within = this.panel.contains(focused) || focused === document.body; // Safari's buttons take no focus from a click
    this.panel.hidden = !open;
    this.levels.show(open);
    element("open-developer").setAttribute("aria-pressed", String(open));
    if (open) this.#later();
    if (open) element("close-developer").focus();
    else if (within) element("open-developer").focus();
  }

  #note(direction, frame) {
    const { payload, ...rest } = frame;
    const shown = payload === undefined ? rest : { ...rest, payload: `${payload.length} characters of base64` };
    this.#frames.push({ at_ms: Math.round(performance.now()), direction, frame: shown });
    if (this.#frames.length > KEPT_FRAMES) this.#frames.splice(0, KEPT_FRAMES / 5);
    this.#later();
  }

  #later() {
    if (this.panel.hidden || this.#stale) return;
    this.#stale = true;
    requestAnimationFrame(() => {
      this.#stale = false;
      this.#show();
    });
  }

  #matching() {
    const wanted = this.filter.value.trim().toLowerCase();
    return this.#frames.filter((one) => !wanted || `${one.direction} ${JSON.stringify(one.frame)}`.toLowerCase().includes(wanted));
  }

  #show() {
    const turns = this.#client.conversation.turns.filter((turn) => !turn.dropped && turn.firstSoundMs !== null);
    const middle = median(turns.map(({ firstSoundMs }) => firstSoundMs));
    element("waterfall-median").textContent = middle === null ? "No answer was heard yet." : `Median of ${turns.length}: ${duration(middle)}`;
    showLines(element("waterfall"), turns.slice(-SHOWN_TURNS).reverse().map((turn) => this.#fall(turn)));
    if (turns.length > 0 && turns.at(-1) !== this.#newest) {
      this.#newest = turns.at(-1);
      this.#falls.get(this.#newest).row.firstChild.open = true; // which closes the other one
    }
    const { queuedMs, underruns, targetMs } = this.#sound;
    const trip = this.#rtt === null ? "–" : `${this.#rtt.toFixed(1)} ms`;
    element("sound-figures").textContent =
      `lead ${duration(queuedMs)} · gathers ${duration(targetMs)} · ran out ${underruns}× · round trip ${trip} · ${tokens(this.#client)}`;
    showLines(element("wire"), this.#matching().slice(-SHOWN_FRAMES).reverse().map((one) => this.#line(one)));
    const lines = this.#request(element("request-language").value);
    if (element("request").textContent !== lines) element("request").textContent = lines;
  }

  /* A turn in one line, which opens to its waterfall. What is known of it may still grow. */
  #fall(turn) {
    const spans = spansOf(timesOf(turn));
    const known = JSON.stringify([turn.user.text, spans]);
    const old = this.#falls.get(turn);
    if (old?.known === known) return old.row;
    const end = Math.max(1, ...spans.map((span) => span.end));
    const row = make("li");
    const details = make("details");
    const summary = make("summary");
    const title = make("span", "title", turn.user.text || "…");
    summary.append(title, make("b", "", shownTime(turn.firstSoundMs)), strip(spans, 0, end));
    details.name = "turn"; // one is open at a time
    details.append(summary, waterfall({ spans, end }));
    row.append(details);
    if (old) {
      const { open } = old.row.firstChild;
      old.row.replaceWith(row);
      details.open = open;
    }
    this.#falls.set(turn, { known, row });
    return row;
  }

  #line(entry) {
    let shown = this.#lines.get(entry);
    if (!shown) this.#lines.set(entry, (shown = line(entry)));
    return shown;
  }

  #request(language) {
    const base = document.baseURI.replace(/[?#].*$/, "");
    const asked = this.#client.conversation.turns.findLast(({ user, dropped }) => user.text && !dropped)?.user.text ?? "Hello";
    const text = JSON.stringify(asked);
    const key = this.hasKey();
    if (language === "python") {
      return [
        "import asyncio",
        key ? "import os\n\nfrom omni_ws.client import connect\n" : "\nfrom omni_ws.client import connect\n",
        "",
        "async def main():",
        `    url = "${base.replace(/^http/, "ws")}v1/streaming_input"`,
        `    async with connect(url${key ? ', api_key=os.environ["OMNI_WS_API_KEY"]' : ""}) as session:`,
        `        answer = await session.ask_text(${text})`,
        "        print(answer.text)",
        "",
        "",
        "asyncio.run(main())",
      ].join("\n");
    }
    if (language === "js") {
      return [
        `import { VoiceClient } from "${base}client.js";`,
        "",
        `const client = new VoiceClient({ url: "${base}"${key ? ", key: () => process.env.OMNI_WS_API_KEY" : ""} });`,
        `client.addEventListener("answered", ({ detail: { turn } }) => console.log(turn.answer.text));`,
        "client.open();",
        `await client.write(${text});`,
      ].join("\n");
    }
    const body = JSON.stringify({ messages: [{ role: "user", content: asked }], stream: true }).replaceAll("'", "'\\''");
    const header = key ? `  -H "Authorization: Bearer $OMNI_WS_API_KEY" \\\n` : "";
    return `curl -N ${base}v1/chat/completions -H 'Content-Type: application/json' \\\n${header}  -d '${body}'`;
  }
}

/* The times of a turn since the end of speech: those that the server tells, and by the page's own clock when it was heard.
   Of a server that tells none there is what the page saw. */
export function timesOf({ speechEndedAt: begin, stoppedAt, heardAt, firstSoundMs, at, answer }) {
  const since = (time) => (time ? Math.max(0, time - begin) : undefined);
  const seen = { turn_decided: since(stoppedAt), transcript_settled: since(at.transcript), first_token: since(at.firstText), first_audio_sent: since(at.firstAudio) };
  return { ...(answer.times ?? seen), first_audio_played: heardAt ? since(heardAt) : firstSoundMs };
}

/* Lines that stay are not touched: one of them may be read, or have the focus. */
function showLines(place, lines) {
  const kept = new Set(lines);
  for (const old of [...place.children]) if (!kept.has(old)) old.remove();
  lines.forEach((one, index) => {
    if (place.children[index] !== one) place.insertBefore(one, place.children[index] ?? null);
  });
}

function line({ at_ms: at, direction, frame }) {
  const entry = make("details", direction);
  const { type, ...rest } = frame;
  const said = JSON.stringify(rest);
  entry.append(make("summary", "", `${(at / 1000).toFixed(2)} ${direction === "sent" ? "↑" : "↓"} ${type} ${said === "{}" ? "" : said.slice(0, 90)}`));
  entry.addEventListener("toggle", () => {
    if (entry.childElementCount === 1) entry.append(make("pre", "", JSON.stringify(frame, null, 2)));
  });
  return entry;
}

function tokens({ conversation }) {
  const used = conversation.turns.map(({ answer }) => answer.usage).filter(Boolean);
  const sum = (name) => used.reduce((total, usage) => total + (usage[name] ?? 0), 0);
  return `${sum("input_tokens")} tokens in, ${sum("output_tokens")} out`;
}

/* Of numbers; null without any. */
export function median(numbers) {
  if (numbers.length === 0) return null;
  const sorted = [...numbers].sort((one, other) => one - other);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
