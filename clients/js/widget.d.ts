/* Types of omni-ws/widget. */

import { ChatError, ChatLine, Shown } from "./chat.js";

export interface VoiceChatEvents {
  state: CustomEvent<{ state: Shown["state"] }>;
  /* All of it so far. */
  transcript: CustomEvent<{ id: string; text: string; final: boolean }>;
  answer: CustomEvent<{ id: string; text: string; final: boolean }>;
  error: CustomEvent<ChatError>;
}

/* <voice-chat src="wss://host/v1/streaming_input" client-secret voice language instructions> */
export class VoiceChatElement extends HTMLElement {
  readonly state: Shown["state"];
  readonly transcript: readonly ChatLine[];
  start(): Promise<void>;
  stop(): void;
  mute(muted?: boolean): void;
  send(text: string): Promise<void>;
  addEventListener<Name extends keyof VoiceChatEvents>(
    name: Name,
    listener: (event: VoiceChatEvents[Name]) => void,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(name: string, listener: EventListenerOrEventListenerObject, options?: boolean | AddEventListenerOptions): void;
}

declare global {
  interface HTMLElementTagNameMap {
    "voice-chat": VoiceChatElement;
  }
}
