/* What is checked by the compiler alone: modules against what client.d.ts declares of them, and a program that uses the
   declarations. The compiler checks the modules that this file imports, too. */

import type * as declared from "../client.js";
import { bytesOf, decodeOutput, encodeInput, FrameError, parseFrame, samplesOf } from "../client/frames.js";
import { Microphone } from "../client/microphone.js";
import { Outgoing } from "../client/outgoing.js";
import { Camera, readImage } from "../client/sights.js";
import { Sound } from "../client/sound.js";
import { Speaker } from "../client/speaker.js";

type Functions = "bytesOf" | "decodeOutput" | "encodeInput" | "parseFrame" | "readImage" | "samplesOf";
export const functions: Pick<typeof declared, Functions> = {
  bytesOf,
  decodeOutput,
  encodeInput,
  parseFrame,
  readImage,
  samplesOf,
};

export const plain: Pick<typeof declared, "Camera" | "FrameError" | "Outgoing"> = { Camera, FrameError, Outgoing };

/* Which events a class has is known to its declaration alone. */
type Own<Class> = Omit<Class, "addEventListener" | "removeEventListener">;
export const microphone = (given: Microphone): Own<declared.Microphone> => given;
export const sound = (given: Sound): Own<declared.Sound> => given;
export const speaker = (given: Speaker): Own<declared.Speaker> => given;

export async function converse(client: declared.VoiceClient): Promise<string> {
  client.addEventListener("firstsound", ({ detail: { turn, ms } }) => turn.number + ms);
  client.addEventListener("audio", ({ detail: { samples } }) => samples.length);
  client.session.addEventListener("rtt", ({ detail }) => detail.toFixed());
  // @ts-expect-error There is no such event.
  client.addEventListener("nothing", () => {});
  // @ts-expect-error Text is a string.
  await client.write(1);
  const turn: declared.Turn = await client.write("Hello");
  return turn.answer.text;
}
