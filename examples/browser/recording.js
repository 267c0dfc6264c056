/* The conversation as files: one WAV in which both sides speak in turn, and one JSON with everything else. */

const PAUSE_SECONDS = 0.4;
const HEADER_BYTES = 44;

/* A mono 16-bit WAV file of the pieces (Int16Array), one behind the other. */
export function wavFile(pieces, rate) {
  const bytes = pieces.reduce((sum, piece) => sum + piece.length, 0) * 2;
  const buffer = new ArrayBuffer(HEADER_BYTES + bytes);
  const view = new DataView(buffer);
  const write = (place, text) => [...text].forEach((letter, index) => view.setUint8(place + index, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + bytes, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, bytes, true);
  let place = HEADER_BYTES;
  for (const piece of pieces) {
    for (const sample of piece) {
      view.setInt16(place, sample, true);
      place += 2;
    }
  }
  return new Blob([buffer], { type: "audio/wav" });
}

/* Both sides of all turns, of each answer as much as was heard. */
export function soundOf(turns, rate) {
  const pause = new Int16Array(Math.round(rate * PAUSE_SECONDS));
  const pieces = [];
  for (const { sound, heardMs } of turns) {
    if (sound.user.length) pieces.push(...sound.user, pause);
    const heard = heardMs === null ? sound.server : cut(sound.server, Math.round((heardMs / 1000) * rate));
    if (heard.length) pieces.push(...heard, pause);
  }
  return pieces;
}

/* The words alone, as one would read them. */
export function textOf(turns) {
  const lines = [];
  for (const { user, answer } of turns) {
    if (user.text) lines.push(`You: ${user.text}`);
    if (answer.text) lines.push(`Answer: ${answer.text}${answer.state === "stopped" ? " [stopped]" : ""}`);
    for (const { title, url, license } of answer.annotations) lines.push(`Source: ${title}, ${url}${license ? ` (${license})` : ""}`);
  }
  return new Blob([`${lines.join("\n\n")}\n`], { type: "text/plain" });
}

export function transcriptOf(turns, session) {
  const told = turns.map(({ kind, startedAt, user, answer, requestId, firstSoundMs, heardMs }) => ({
    kind,
    started_at: startedAt.toISOString(),
    user: { text: user.text, images: user.images.length },
    answer: { text: answer.text, state: answer.state, finish_reason: answer.finishReason, usage: answer.usage, annotations: answer.annotations },
    request_id: requestId,
    first_sound_ms: rounded(firstSoundMs),
    heard_ms: rounded(heardMs),
  }));
  return new Blob([JSON.stringify({ saved_at: new Date().toISOString(), ...session, turns: told }, null, 2)], {
    type: "application/json",
  });
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/* The first samples of the pieces. */
export function cut(pieces, samples) {
  const kept = [];
  for (const piece of pieces) {
    if (samples <= 0) break;
    kept.push(piece.subarray(0, samples));
    samples -= piece.length;
  }
  return kept;
}

function rounded(number) {
  return number === null ? null : Math.round(number);
}
