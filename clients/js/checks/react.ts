/* As types.ts, for omni-ws/react: it needs React's types. */

import type * as declared from "../react.js";
import { useVoiceChat } from "../react.js";

export const modules: typeof declared = { useVoiceChat };

export function Words(): string {
  const chat = useVoiceChat({ url: "wss://voice.example/v1/streaming_input", language: "en" });
  // @ts-expect-error A page has no key.
  useVoiceChat({ url: "/", key: "secret" });
  return chat.transcript.map(({ who, text }) => `${who}: ${text}`).join("\n") + chat.levels.you.toFixed(1) + chat.state;
}
