/* Types of omni-ws. */

export type Modality = "text" | "audio" | "video" | "image";

/* What the engine of the server can do; see "session_created" in the protocol. */
export interface Capabilities {
  input_modalities: Modality[];
  output_modalities: string[];
  voices: string[];
  /* RFC 5646, by the names of voices. */
  voice_languages?: Record<string, string>;
  /* RFC 5646: the languages that recognition knows, and those that the voice follows the user in. */
  languages?: string[];
  speech_languages?: string[];
  tasks: string[];
  tools: boolean;
  turn_detection: boolean;
  turn_detection_types?: string[];
  transcripts?: boolean;
  /* Whether recognition takes `input_audio.keywords` and `input_audio.prompt`. */
  keywords?: boolean;
  /* Whether the voice takes `tts.lexicon`. */
  lexicon?: boolean;
  /* Whether the server takes calls, as `omni-ws/call` makes them. */
  webrtc?: boolean;
  [name: string]: unknown;
}

/* A JSON frame of the protocol; its type says which fields it has. */
export interface Frame {
  type: string;
  [name: string]: any;
}

/* Fields of session_config. */
export type SessionConfig = Record<string, unknown>;

export interface ServerError {
  code: string;
  message: string;
  param?: string;
  request_id?: string;
  /* The name of the chunk that was refused. */
  ref?: string;
  retryable?: boolean;
  retry_after_ms?: number;
}

export interface Word {
  text: string;
  start_ms: number;
  end_ms: number;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
  result?: string;
}

export interface Turn {
  readonly number: number;
  /* The name under which its input is sent. */
  readonly ref: string;
  /* The server's name of what was said, where it noticed that somebody spoke. */
  turnId: string | null;
  readonly kind: "spoken" | "heard" | "written" | "greeting" | "tool";
  readonly startedAt: Date;
  /* `interim` is heard and may still change. `images` are what `turnstart` was given. */
  user: { text: string; interim: string; images: string[]; done: boolean };
  answer: {
    text: string;
    words: Word[];
    state: "none" | "thinking" | "speaking" | "held" | "done" | "stopped" | "failed";
    /* A code of the protocol, or a sentence. */
    error: string;
    /* What the server says about it. */
    reason: string;
    finishReason: string | null;
    usage: Record<string, number> | null;
    /* Milliseconds from the end of the speech, or else of the input, to the steps of the answer, by their names. */
    times: Record<string, number> | null;
    /* What was done otherwise than asked. */
    warnings: { code: string; message: string; param: string | null }[];
    /* The web pages that the answer is taken from; the indexes are places in `text`, in characters. */
    annotations: { type: "url_citation"; title: string; url: string; start_index: number; end_index: number; license?: string }[];
    calls: ToolCall[];
  };
  requestId: string | null;
  firstSoundMs: number | null;
  /* How much of the answer was heard, once it ended or was cut short. */
  heardMs: number | null;
  dropped: boolean;
  sound: { user: Int16Array[]; server: Int16Array[] };
}

export interface Tool {
  description?: string;
  parameters?: Record<string, unknown>;
  /* Whether the talk goes on while it runs: the server tells the result at the next pause. */
  async?: boolean;
  run(args: any): unknown;
}

export interface SessionOptions {
  /* Ask for the times of spoken words; true by default. */
  words?: boolean;
  /* A class like the global one, for runtimes without it. */
  WebSocket?: new (url: URL | string, protocols: string[]) => WebSocket;
}

export interface VoiceClientOptions extends SessionOptions {
  /* The server's address, http or https. */
  url: string | URL;
  key?: () => string;
  config?: SessionConfig | ((capabilities: Capabilities) => SessionConfig);
  tools?: Record<string, Tool>;
  mode?: "open" | "hold";
  /* Makes the session and the speaker in place of a WebSocket's: `omni-ws/call` does. */
  connect?: (client: VoiceClient) => VoiceClientParts;
}

export interface VoiceClientParts {
  session: Session;
  speaker: Speaker;
}

export type ClientState =
  | "connecting"
  | "waiting"
  | "refused"
  | "ended"
  | "starting"
  | "opening"
  | "hearing"
  | "speaking"
  /* The answer plays on, lowered: it is not known yet whether what is heard interrupts it. */
  | "ducked"
  | "thinking"
  | "listening"
  | "muted"
  | "ready";

interface Listening<Events> {
  addEventListener<Name extends keyof Events & string>(
    name: Name,
    listener: (event: CustomEvent<Events[Name]>) => void,
    options?: AddEventListenerOptions,
  ): void;
  removeEventListener<Name extends keyof Events & string>(name: Name, listener: (event: CustomEvent<Events[Name]>) => void): void;
}

/* What a class with these events extends: EventTarget, with their names. */
type Telling<Events> = new () => Listening<Events> & Pick<EventTarget, "dispatchEvent">;

export interface VoiceClientEvents {
  change: undefined;
  turn: { turn: Turn };
  turnstart: { turn: Turn };
  turnend: undefined;
  answered: { turn: Turn };
  audio: { turn: Turn; samples: Int16Array };
  firstsound: { turn: Turn; ms: number };
  /* The server says "mm-hm" in a pause of the user, at the rate of the frame. */
  murmur: { samples: Int16Array };
  locked: undefined;
  /* `cause`: there is no sound or no microphone, and `error.code` is its name. */
  error: { error: ServerError; cause?: Error };
}

export interface VoiceClient extends Listening<VoiceClientEvents> {}
export class VoiceClient {
  constructor(options: VoiceClientOptions);
  readonly session: Session;
  readonly conversation: Conversation;
  readonly talk: Talk;
  readonly sound: Sound;
  readonly microphone: Microphone;
  readonly speaker: Speaker;
  readonly state: ClientState;
  readonly capabilities: Capabilities | null;
  readonly heardTurn: Turn | null;
  wantedMode: "open" | "hold";
  /* `configure` tells the server of others. */
  tools: Record<string, Tool>;
  open(): void;
  close(): void;
  listen(): Promise<void>;
  configure(): void;
  write(text: string): Promise<Turn>;
  say(samples: Int16Array): Turn;
  show(modality: Modality, payload: Uint8Array): void;
  interrupt(exception?: Turn | null): void;
  resend(turn: Turn, text?: string): Promise<boolean>;
  startAnew(): void;
}

export interface SessionEvents {
  state: { state: string; again?: boolean; seconds?: number; reason?: string; notice?: { error?: ServerError } | null };
  undelivered: { turn: number; code: string };
  created: { session_id: string; model: string; capabilities: Capabilities; lost: boolean; resent: Set<number>; [name: string]: unknown };
  resumed: { session_id: string; next_sequence_id: number; replayed: number };
  frame: Frame;
  rtt: number;
}

export interface Session extends Listening<SessionEvents> {}
export class Session {
  constructor(base: string | URL, key: () => string, options?: SessionOptions);
  readonly state: "connecting" | "open" | "waiting" | "refused" | "ended";
  readonly starting: boolean;
  readonly ready: boolean;
  readonly bufferedBytes: number;
  readonly maxChunkBytes: number;
  readonly unacknowledged: number;
  readonly endsResults: boolean;
  onwire: ((direction: "sent" | "received", frame: Frame) => void) | null;
  open(): void;
  close(): void;
  startAnew(): void;
  hurry(): void;
  check(): void;
  configure(configuration: SessionConfig): void;
  sendChunk(chunk: InputChunk): boolean;
  hasBegun(turn: number | null): boolean;
  answered(turn: number | null): void;
  cancel(requestId?: string): void;
  truncate(requestId: string): boolean;
  acknowledge(playedMs?: number, requestId?: string | null): void;
}

export interface InputChunk {
  modality: Modality;
  payload: Uint8Array;
  endOfInput?: boolean;
  turn?: number | null;
  toolCallId?: string | null;
  /* The client's name of the request that it opens or joins. */
  ref?: string | null;
}

export interface ConversationEvents {
  change: { turn: Turn };
}

export interface Conversation extends Listening<ConversationEvents> {}
export class Conversation {
  readonly turns: Turn[];
  readonly current: Turn | null;
  readonly isNamed: boolean;
  readonly nextRef: string;
  begin(kind: Turn["kind"], given?: { text?: string; images?: string[] }): Turn;
  endSpeech(turn: Turn, at: number): void;
  hold(turn: Turn): void;
  stop(turn: Turn): void;
  fail(turn: Turn, why: string): void;
  cut(turn: Turn, heardMs: number): void;
  heard(turn: Turn, found: { firstSoundMs?: number; heardMs?: number }): void;
  answerCall(turn: Turn, call: ToolCall, result: string): void;
  missResults(): void;
  drop(turn: Turn, end?: number): void;
  clear(): void;
  saidAs(turnId: string): Turn | undefined;
  hear(turn: Turn, frame: Frame): Turn;
  settled(): Promise<void>;
  keepSound(turn: Turn, side: "user" | "server", samples: Int16Array): void;
  lose(resent: Set<number>): void;
  apply(frame: Frame): Turn | null;
}

export function isOwed(turn: Turn): boolean;

export interface TalkEvents {
  change: undefined;
  turn: { turn: Turn };
  level: { peak: number };
  silent: undefined;
  problem: { error: Error };
  network: { state: "slow" | "paused" | "well" };
}

export interface Talk extends Listening<TalkEvents> {}
export class Talk {
  constructor(parts: { sound: Sound; microphone: Microphone; session: Session; conversation: Conversation });
  mode: "open" | "hold";
  devices: MicrophoneChoice;
  readonly phase: "off" | "opening" | "talking" | "listening";
  readonly opening: boolean;
  readonly muted: boolean;
  press(at: number): Promise<Error | undefined>;
  release(at: number): void;
  stop(): void;
  leave(turn: number): void;
  mute(muted: boolean): void;
  reopen(): Promise<void>;
  forgetPlaces(): void;
  spokenAt(audioMs: number): number | null;
  samplesBetween(startMs: number, endMs: number): Int16Array[];
}

export interface MicrophoneChoice {
  deviceId?: string;
  echoCancellation?: boolean;
  noiseSuppression?: boolean;
  autoGainControl?: boolean;
}

export interface MicrophoneEvents {
  chunk: { samples: Int16Array; peak: number; capturedAt: number };
  lost: undefined;
}

export interface Microphone extends Listening<MicrophoneEvents> {}
export class Microphone {
  readonly isOpen: boolean;
  readonly settings: MediaTrackSettings;
  readonly cancelsEcho: boolean | null;
  muted: boolean;
  readonly track: MediaStreamTrack | null;
  open(context: AudioContext, choice: MicrophoneChoice): Promise<void>;
  close(): void;
}

export interface SoundEvents {
  change: undefined;
}

export interface Sound extends Listening<SoundEvents> {}
export class Sound {
  constructor(server?: string | URL);
  readonly rate: number | null;
  readonly context: AudioContext | null;
  readonly locked: boolean;
  readonly canChooseOutput: boolean;
  readonly latencySamples: number;
  wake(): Promise<AudioContext>;
  running(): Promise<void>;
  close(): void;
  revive(): void;
  chooseOutput(deviceId: string): Promise<void>;
  heardAt(time: number): number;
}

export interface SpeakerEvents {
  started: { id: number; heardAt: number };
  ended: { id: number; playedMs: number };
  flushed: { id: number; playedMs: number };
  level: { peak: number; queuedMs: number; underruns: number; targetMs: number };
  overflow: { id: number };
}

export interface Speaker extends Listening<SpeakerEvents> {}
export class Speaker {
  constructor(sound: Sound);
  readonly playing: boolean;
  readonly playingId: number | undefined;
  readonly playedMs: number | undefined;
  attach(context: AudioContext): void;
  play(id: number, samples: Int16Array, place: number): void;
  end(id: number): void;
  /* Lower the sound by 15 dB, which plays on, or let it be as loud as before. */
  duck(lowered: boolean): void;
  flush(): void;
}

export class Camera {
  static readonly canShareScreen: boolean;
  constructor(video: HTMLVideoElement);
  readonly isOn: boolean;
  onended: () => void;
  open(source?: "camera" | "screen"): Promise<void>;
  close(): void;
  frame(stillWanted: () => boolean): Promise<Uint8Array | null>;
}

export function readImage(file: Blob): Promise<{ payload: Uint8Array; url: string }>;

export class Outgoing {
  constructor(maxBytes?: number);
  readonly keptBytes: number;
  readonly unacknowledged: number;
  readonly stuckAt: number | null | undefined;
  hasRoom(bytes: number): boolean;
  isGone(turn: number | null): boolean;
  add(chunk: InputChunk): Uint8Array | string;
  turnOf(sequenceId: number | null): number | null;
  refuse(sequenceId: number): { turn: number; isOver: boolean; isOpen: boolean } | null;
  hasBegun(turn: number | null): boolean;
  /* Whether the server had never had all of that before. */
  acknowledge(next: number): boolean;
  answered(turn: number | null): void;
  resume(next: number): (Uint8Array | string)[];
  restart(maxChunkBytes?: number): {
    frames: (Uint8Array | string)[];
    turns: Set<number>;
    lost: Set<number | null>;
    tooLarge: Set<number | null>;
  };
  giveUp(turn: number): void;
}

export class FrameError extends Error {
  constructor(message: string);
  readonly code: string;
}

export interface NumberedChunk {
  sequenceId: number;
  modality: Modality;
  payload: Uint8Array;
  endOfInput?: boolean;
  timestampMs?: number | null;
  toolCallId?: string | null;
  ref?: string | null;
}

export function encodeInput(chunk: NumberedChunk): Uint8Array | string;
export function decodeOutput(buffer: ArrayBuffer): { sequenceId: number; modality: Modality; startMs: number | null; payload: Uint8Array };
export function parseFrame(text: string): Frame;
export function samplesOf(payload: Uint8Array): Int16Array;
export function bytesOf(samples: Int16Array): Uint8Array;
