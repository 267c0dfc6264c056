/* Sound as a file of Opus in Ogg (RFC 7845): the browser encodes, and its packets are put into pages here. */

const OPUS_RATE = 48_000; // of all places in such a file, whatever the rate of the sound was
const BITRATE = 24_000;
/* A page is where a player can jump to: a second of packets of 20 ms. Its table has room for 255 entries. */
const PACKETS_A_PAGE = 50;
const MOST_ENTRIES = 255;
/* Pieces that wait for the encoder. */
const MOST_WAITING = 16;
const [FIRST_PAGE, LAST_PAGE] = [2, 4];

const configOf = (rate) => ({ codec: "opus", sampleRate: rate, numberOfChannels: 1, bitrate: BITRATE });

/* Whether this browser can encode, on this page: only one that came over https, or from this machine, may. */
export async function canEncode(rate) {
  try {
    return (await AudioEncoder.isConfigSupported(configOf(rate))).supported === true;
  } catch {
    return false;
  }
}

/* The file of what `pieces` (Int16Array, one after the other, also asynchronously) have at a rate. */
export async function oggOpus(pieces, rate) {
  const pages = new Pages();
  let problem = null;
  const encoder = new AudioEncoder({
    output: (chunk, { decoderConfig } = {}) => {
      if (decoderConfig) pages.begin(decoderConfig.description);
      const packet = new Uint8Array(chunk.byteLength);
      chunk.copyTo(packet);
      pages.add(packet, (chunk.duration * OPUS_RATE) / 1e6);
    },
    error: (error) => (problem = error),
  });
  encoder.configure(configOf(rate));
  let frames = 0;
  try {
    for await (const piece of pieces) {
      if (piece.length === 0) continue;
      const timestamp = Math.round((frames / rate) * 1e6);
      const data = new AudioData({ format: "s16", sampleRate: rate, numberOfFrames: piece.length, numberOfChannels: 1, timestamp, data: piece });
      encoder.encode(data);
      data.close();
      frames += piece.length;
      while (!problem && encoder.encodeQueueSize > MOST_WAITING) await new Promise((go) => (encoder.ondequeue = go));
      if (problem) throw problem;
    }
    await encoder.flush();
  } finally {
    if (encoder.state !== "closed") encoder.close();
  }
  if (problem) throw problem;
  return pages.end(Math.round((frames / rate) * OPUS_RATE));
}

class Pages {
  #pages = [];
  #packets = [];
  #entries = 0;
  #preSkip = 0;
  #place = 0;

  /* `head` is the packet that says how to decode, of WebCodecs' registration of Opus. */
  begin(head) {
    if (this.#pages.length) return;
    const bytes = ArrayBuffer.isView(head) ? new Uint8Array(head.buffer, head.byteOffset, head.byteLength) : new Uint8Array(head);
    this.#preSkip = new DataView(bytes.buffer, bytes.byteOffset).getUint16(10, true);
    this.#packets = [bytes];
    this.#close(0, FIRST_PAGE);
    const vendor = new TextEncoder().encode("omni_ws");
    this.#packets = [Uint8Array.of(...new TextEncoder().encode("OpusTags"), vendor.length, 0, 0, 0, ...vendor, 0, 0, 0, 0)];
    this.#close(0);
  }

  add(packet, samples) {
    const entries = Math.floor(packet.length / 255) + 1;
    if (this.#packets.length === PACKETS_A_PAGE || this.#entries + entries > MOST_ENTRIES) this.#close(this.#place);
    this.#packets.push(packet);
    this.#entries += entries;
    this.#place += samples;
  }

  /* So many samples are sound; the last packet may have more. */
  end(samples) {
    this.#close(Math.min(this.#place, samples + this.#preSkip), LAST_PAGE);
    return new Blob(this.#pages, { type: "audio/ogg" });
  }

  /* The page that ends at a place (RFC 3533, section 6). */
  #close(place, kind = 0) {
    const table = this.#packets.flatMap(({ length }) => [...new Array(Math.floor(length / 255)).fill(255), length % 255]);
    const head = new Uint8Array(27 + table.length);
    const view = new DataView(head.buffer);
    head.set([0x4f, 0x67, 0x67, 0x53, 0, kind]); // "OggS", version 0
    view.setBigUint64(6, BigInt(Math.round(place)), true);
    view.setUint32(14, 1, true); // the only stream
    view.setUint32(18, this.#pages.length, true);
    head[26] = table.length;
    head.set(table, 27);
    const page = new Uint8Array(head.length + this.#packets.reduce((sum, { length }) => sum + length, 0));
    page.set(head);
    let at = head.length;
    for (const packet of this.#packets) {
      page.set(packet, at);
      at += packet.length;
    }
    new DataView(page.buffer).setUint32(22, checksum(page), true);
    this.#pages.push(page);
    this.#packets = [];
    this.#entries = 0;
  }
}

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let rest = byte << 24;
  for (let bit = 0; bit < 8; bit++) rest = rest & 0x80000000 ? (rest << 1) ^ 0x04c11db7 : rest << 1;
  return rest >>> 0;
});

function checksum(bytes) {
  let sum = 0;
  for (const byte of bytes) sum = (sum << 8) ^ TABLE[(sum >>> 24) ^ byte];
  return sum >>> 0;
}
