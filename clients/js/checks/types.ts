/* What is checked by the compiler alone: modules against what client.d.ts declares of them, and a program that uses the
   declarations. The compiler checks the modules that this file imports, too. */

import type * as declaredCall from "../call.js";
import type * as declared from "../client.js";
import { VoiceCall } from "../client/call.js";
import { Conversation, isOwed } from "../client/conversation.js";
import { bytesOf, decodeOutput, encodeInput, FrameError, parseFrame, samplesOf } from "../client/frames.js";
import { Microphone } from "../client/microphone.js";
import { Outgoing } from "../client/outgoing.js";
import { Session } from "../client/session.js";
import { Camera, readImage } from "../client/sights.js";
import { Sound } from "../client/sound.js";
import { Speaker } from "../client/speaker.js";
import { Talk } from "../client/talk.js";
import { VoiceClient } from "../client/voice-client.js";

/* All that is declared. Parameters of methods may be narrower: turns are always those that the package gave. */
export const modules: typeof declared = {
  bytesOf,
  Camera,
  Conversation,
  decodeOutput,
  encodeInput,
  FrameError,
  isOwed,
  Microphone,
  Outgoing,
  parseFrame,
  readImage,
  samplesOf,
  Session,
  Sound,
  Speaker,
  Talk,
  VoiceClient,
};

export const callModules: typeof declaredCall = { VoiceCall };

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
