/* A recorded call as a file to give to others. Its sound is read piece by piece, however long it is. */

import { samplesOf } from "../../client/frames.js";
import { download } from "../recording.js";
import { ask } from "./access.js";
import { fileName, sharedFile } from "./shared-file.js";
import { formatOf } from "./wave.js";

const PIECE_FRAMES = 1 << 18;
const HEAD_BYTES = 4096;
const CHANNELS = 2;

/* `base` is the address of what belongs to the call. Raises an Error with a sentence. */
export async function shareCall(call, base) {
  const template = await (await ask(new URL("../browser/calls/shared.html", document.baseURI))).text();
  const leftOut = [
    call.turns_left_out && `The server left out ${call.turns_left_out} turns.`,
    call.turns.some(({ tools }) => tools?.length) && "What tools were asked, and what they gave, is left out.",
  ];
  const sound = call.sound && (await recordedSound(new URL("sound.wav", base)));
  const file = await sharedFile(template, { ...call, left_out: leftOut.filter(Boolean) }, sound);
  download(file, fileName(call.started));
}

async function recordedSound(address) {
  const bytesOf = async (from, to) => new Uint8Array(await (await ask(address, { headers: { Range: `bytes=${from}-${to - 1}` } })).arrayBuffer());
  const format = formatOf(await bytesOf(0, HEAD_BYTES));
  if (format?.channels !== CHANNELS) throw new Error("The sound of this call is not in a form that this page can read.");
  const { begin, rate, frames } = format;
  return {
    rate,
    async *read(from, count) {
      const end = Math.min(frames, from + count);
      for (let at = from; at < end; at += PIECE_FRAMES) {
        const next = Math.min(end, at + PIECE_FRAMES);
        const both = samplesOf(await bytesOf(begin + 2 * CHANNELS * at, begin + 2 * CHANNELS * next));
        const side = (channel) => Int16Array.from({ length: next - at }, (_, place) => both[CHANNELS * place + channel]);
        yield { user: side(0), answer: side(1) };
      }
    },
  };
}
