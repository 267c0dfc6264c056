/* Types of omni-ws/chat. */

import { ClientState, Listening, SessionConfig, Tool, VoiceClient } from "./client.js";

export interface ChatOptions {
  /* The server's address, or that of its WebSocket: https://host/ or wss://host/v1/streaming_input. */
  url: string | URL;
  /* Made by `POST /v1/streaming_input/client_secrets`; a function gives that of the moment. */
  clientSecret?: string | (() => string);
  voice?: string;
  /* The language that is spoken to it (RFC 5646). */
  language?: string;
  instructions?: string;
  /* Other fields of session_config. */
  config?: SessionConfig;
  tools?: Record<string, Tool>;
}

/* One line of the transcript: a message of the user, or an answer. */
export interface ChatLine {
  readonly id: string;
  readonly who: "you" | "server";
  readonly text: string;
  /* What is heard behind `text` and may still change. */
  readonly interim: string;
  readonly done: boolean;
  /* Where in `text` the word stands that sounds: [from, to). */
  readonly spoken: readonly [number, number] | null;
  /* Of an answer that failed: a code of the protocol, or a sentence. */
  readonly error?: string;
}

export interface ChatError {
  /* A code of the protocol, or the name of the Error for which there is no sound or no microphone. */
  readonly code: string;
  readonly message: string;
}

export interface Shown {
  /* As of a VoiceClient; "idle" before it connects and behind the end. */
  readonly state: ClientState | "idle";
  readonly transcript: readonly ChatLine[];
  readonly muted: boolean;
  /* Whether the microphone is open, or is being opened. */
  readonly talking: boolean;
  /* Whether the server takes speech, and speaks. */
  readonly hears: boolean;
  readonly speaks: boolean;
  readonly error: ChatError | null;
}

export interface ChatEvents {
  change: undefined;
  said: { line: ChatLine };
  answered: { line: ChatLine };
  interrupted: undefined;
  level: { side: "you" | "server"; peak: number };
  error: ChatError;
}

export interface VoiceChat extends Listening<ChatEvents> {}
export class VoiceChat {
  constructor(options: ChatOptions);
  readonly client: VoiceClient;
  readonly levels: { you: number; server: number };
  readonly shown: Shown;
  start(): Promise<void>;
  stop(): void;
  mute(muted?: boolean): void;
  send(text: string): Promise<void>;
  configure(options: ChatOptions): void;
  close(): void;
}

export function serverOf(address: string | URL): string;
