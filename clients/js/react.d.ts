/* Types of omni-ws/react. */

import { ChatOptions, Shown, VoiceChat } from "./chat.js";

export { ChatError, ChatLine, ChatOptions, Shown } from "./chat.js";

export interface VoiceChatOfHook extends Shown {
  /* How loud both sides are, from 0 to 1: read it in each frame, as it changes without rendering anything anew. */
  readonly levels: { readonly you: number; readonly server: number };
  /* Listen: call it from a gesture. */
  start(): Promise<void>;
  stop(): void;
  /* Without an argument, the other way round. */
  mute(muted?: boolean): void;
  send(text: string): Promise<void>;
  readonly chat: VoiceChat;
}

export function useVoiceChat(options: ChatOptions): VoiceChatOfHook;
