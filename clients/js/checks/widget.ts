/* As types.ts, for omni-ws/chat and omni-ws/widget. */

import type * as declaredChat from "../chat.js";
import type * as declaredWidget from "../widget.js";
import { serverOf, VoiceChat } from "../widget/chat.js";
import { VoiceChatElement } from "../widget/element.js";

export const chatModules: typeof declaredChat = { serverOf, VoiceChat };
export const widgetModules: typeof declaredWidget = { VoiceChatElement };

export function embed(page: Document): void {
  const widget = page.createElement("voice-chat");
  widget.addEventListener("answer", ({ detail: { text, final } }) => final && text.trim());
  widget.addEventListener("error", ({ detail }) => detail.code.trim());
  // @ts-expect-error An answer has no words.
  widget.addEventListener("answer", ({ detail }) => detail.words);
  widget.mute(true);
}
