/* A conversation by voice: joins the microphone, the session and the speaker. Its parts are there to be listened to:
   `session`, `conversation`, `talk`, and, in a browser, `sound`, `microphone` and `speaker`. Events of its own:

   change                     `state` may be another one
   turn     { turn }          a turn of the conversation changed
   turnstart { turn }         someone begins to speak or write: what goes with the turn is sent now
   turnend                    and has finished
   answered { turn }          all of an answer has come
   audio    { turn, samples } sound of an answer (Int16Array), to be read at once
   firstsound { turn, ms }    how long an answer took, from the end of speech to the ear
   locked                     there is something to hear, and the browser wants to be touched first
   error    { error, cause }  what went wrong with no turn in particular: what the server says, that it does not take pages of
                              this origin, that it sends more than can be kept to be played; where there is no sound or no
                              microphone, `cause` is the Error, and its name the code */

/** @import { Capabilities, ClientState, Frame, InputChunk, Modality, SessionConfig, SessionEvents } from "../client.js" */
/** @import { Telling, Tool, ToolCall, Turn } from "../client.js" */
/** @import { VoiceClientEvents, VoiceClientOptions, VoiceClientParts } from "../client.js" */
/** @import { KeptTurn } from "./conversation.js" */

import { Conversation, isOwed } from "./conversation.js";
import { bytesOfBase64, samplesOf } from "./frames.js";
import { Microphone } from "./microphone.js";
import { Session } from "./session.js";
import { Sound } from "./sound.js";
import { Speaker } from "./speaker.js";
import { Talk } from "./talk.js";

const ACKNOWLEDGE_MS = 250;
/* Outside of browsers a turn is what `say` is given. */
const MAY_LISTEN = typeof AudioContext !== "undefined";
/* Sound that begins so many samples before the end of what is here does not overlap: places are told in whole milliseconds. */
const OVERLAP = 100;
/* A model that calls tools without end gets no more results after so many. */
const MAX_TOOL_TURNS = 5;
/* Sound that a server makes faster than it is heard is asked for as it is needed; behind an open microphone the server's own
   choice is shorter. */
const MAX_LEAD_MS = 120_000;
const TOO_MUCH = "Too much waits to be sent. Wait until the connection is back.";
const TOO_LARGE = "payload_too_large";

export class VoiceClient extends /** @type {Telling<VoiceClientEvents>} */ (EventTarget) {
  /** @type {VoiceClientParts["session"]} */
  session;
  /** @type {VoiceClientParts["speaker"]} */
  speaker;
  /** @type {Capabilities | null} */
  capabilities = null;
  /* What the server hears someone say, with an open microphone. */
  /** @type {KeptTurn | null} */
  heardTurn = null;
  /* The number of the turn that the page itself began, while it is being said. */
  /** @type {number | null} */
  #pageTurn = null;
  #openSince = Infinity; // performance.now() of when the connection was made
  #resumed = false; // and no sound has come since
  #lastSpeechMs = -1; // where in the audio that began which the server heard last
  /* The name of what the server hears over an answer, until it knows whether that interrupts: the sound is lowered. */
  /** @type {string | null} */
  #uncertain = null;
  /** @type {number | null} */
  #configuredRate = null;
  /** @type {{ requestId: string, resolve: (done: boolean) => void } | null} */
  #truncating = null;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #acknowledger;
  /* Sessions so far: the results of a tool belong to the one that asked. */
  #sessions = 0;
  /* Turns of which sound was given to the speaker and not all of it has come out. */
  /** @type {Set<number>} */
  #sounding = new Set();
  /* Requests that the server was told to stop. */
  /** @type {Set<string>} */
  #cancelled = new Set();
  /* The code of the error for which there is no session, said once. */
  #refusal = "";

  /* `url` is the server's address, http or https. `key` gives the key of the moment, or "". `config` is the
     session_config, or gives it for the server's capabilities. `tools` are functions by name, each with a `description`
     and JSON Schema `parameters`. `mode` is "open" or "hold" (talk.js). `WebSocket` replaces the global one, and
     `connect` makes another session and speaker (call.js). */
  /** @param {VoiceClientOptions} options */
  constructor({ url, key = () => "", config = {}, tools = {}, mode = MAY_LISTEN ? "open" : "hold", connect, ...options }) {
    super();
    /** @type {(capabilities: Capabilities) => SessionConfig} */
    this.config = typeof config === "function" ? config : () => config;
    /** @type {Record<string, Tool>} */
    this.tools = tools;
    this.wantedMode = mode;
    this.conversation = new Conversation();
    this.sound = new Sound(url);
    this.microphone = new Microphone();
    const { session, speaker } = connect?.(this) ?? {};
    this.session = session ?? new Session(url, key, options);
    this.speaker = speaker ?? new Speaker(this.sound);
    this.talk = new Talk(this);
    this.#listenToSession();
    this.#listenToSpeaker();
    this.#listenToTalk();
    this.sound.addEventListener("change", () => this.#soundChanged());
    this.conversation.addEventListener("change", ({ detail }) => this.#emit("turn", detail));
  }

  /* What goes on, in one word. */
  /** @returns {ClientState} */
  get state() {
    const { session, talk } = this;
    if (session.state !== "open") return session.starting ? "starting" : session.state;
    if (talk.opening) return "opening";
    if (talk.phase === "talking" || this.heardTurn) return "hearing";
    if (this.speaker.playing) return this.#uncertain ? "ducked" : "speaking";
    if (this.conversation.current) return "thinking";
    if (talk.phase === "listening") return talk.muted ? "muted" : "listening";
    return "ready";
  }

  /* Connect. The session is resumed whenever the connection breaks, until `close`. */
  open() {
    this.#acknowledger ??= setInterval(() => this.#acknowledge(), ACKNOWLEDGE_MS);
    this.session.open();
  }

  /* End the session and give the sound back. `open` begins anew. */
  close() {
    clearInterval(this.#acknowledger);
    this.#acknowledger = undefined;
    this.talk.stop();
    this.speaker.flush();
    this.session.close();
    this.sound.close();
  }

  /* Open the microphone (mode "open"), or begin a turn (mode "hold"): call it from a gesture. Raises the Error for which there
     is no sound or no microphone. */
  async listen() {
    const error = await this.talk.press(0);
    if (error) throw error;
  }

  /* Say the configuration again: `config` gives something else now. */
  configure() {
    if (!this.capabilities) return;
    const { talk, capabilities } = this;
    // Where the server cannot tell who speaks, the button is the only way.
    const mode = capabilities.turn_detection ? this.wantedMode : "hold";
    if (talk.mode !== mode && talk.phase !== "off") talk.stop();
    talk.mode = mode;
    /** @type {Record<string, any>[]} */
    const [defaults, chosen] = [this.#defaults(capabilities), this.config(capabilities)];
    const heard = { ...defaults.input_audio, ...chosen.input_audio };
    this.session.configure({ ...defaults, ...chosen, input_audio: heard });
    this.#changed();
  }

  /* Write instead of talking. Returns the turn. */
  /** @param {string} text */
  async write(text) {
    // An answer that is not heard can still be read. Whoever closed the client meanwhile is told nothing of its sound.
    await this.sound.wake().catch((error) => MAY_LISTEN && this.#acknowledger && this.#soundFailed(error));
    // What is written does not join what is being said: that is at its end, and this takes its place.
    if (this.talk.phase === "talking") this.talk.stop();
    this.#endHeardTurn();
    this.interrupt();
    const turn = this.conversation.begin("written", { text });
    this.#pageTurn = turn.number;
    this.#emit("turnstart", { turn });
    this.#emit("turnend");
    const payload = new TextEncoder().encode(text);
    turn.speechEndedAt = performance.now();
    this.#send(turn, { modality: "text", payload, endOfInput: true });
    this.#pageTurn = null;
    this.conversation.heard(turn, {});
    this.#changed();
    return turn;
  }

  /* Say samples (Int16Array) as one turn, without a microphone: `rate` is that of `config.input_audio`. */
  /** @param {Int16Array} samples */
  say(samples) {
    this.interrupt();
    const turn = this.conversation.begin("spoken");
    const before = this.#pageTurn;
    this.#pageTurn = turn.number;
    this.#emit("turnstart", { turn });
    this.#emit("turnend");
    this.#pageTurn = before;
    const payload = new Uint8Array(samples.buffer.slice(samples.byteOffset, samples.byteOffset + samples.byteLength));
    if (this.#send(turn, { modality: "audio", payload, endOfInput: true })) {
      this.conversation.endSpeech(turn, performance.now());
    }
    return turn;
  }

  /* A picture that belongs to the turn of the moment: `payload` is the file's bytes. */
  /** @param {Modality} modality @param {Uint8Array} payload */
  show(modality, payload) {
    if (this.session.sendChunk({ modality, payload, turn: this.#pageTurn, ref: this.#ref })) return;
    const isLarge = payload.byteLength > this.session.maxChunkBytes;
    this.#emit("error", { error: { code: isLarge ? TOO_LARGE : "undeliverable", message: isLarge ? "" : TOO_MUCH } });
  }

  /* The name of the turn of the moment, or, where there is none, of the one that begins next. */
  get #ref() {
    const { turns, nextRef } = this.conversation;
    return (this.#pageTurn === null ? this.heardTurn : turns[this.#pageTurn])?.ref ?? nextRef;
  }

  /* Send a chunk of a turn, which fails where that cannot be. */
  /** @param {KeptTurn} turn @param {InputChunk} chunk */
  #send(turn, chunk) {
    const sent = this.session.sendChunk({ ...chunk, turn: turn.number, ref: turn.ref });
    if (!sent) this.conversation.fail(turn, TOO_MUCH);
    return sent;
  }

  /* Stop playing, and cancel on the server, by their names, the answers that are awaited, under way or heard: nothing else
     stops, and what somebody begins to say goes on. */
  /** @param {Turn | null} [exception] */
  interrupt(exception = null) {
    const { speaker, conversation } = this;
    if (speaker.playing) this.#acknowledge();
    for (const turn of conversation.turns) {
      // Also where all of it has come: the server keeps in mind what was heard of it.
      const sounds = this.#sounding.has(turn.number) || speaker.playingId === turn.number;
      if (turn !== exception && (isOwed(turn) || sounds)) this.#cancel(turn);
    }
    this.#silence(exception);
    this.#changed();
  }

  /* The server is told once to stop an answer: as soon as it has named it. */
  /** @param {Turn} turn */
  #cancel({ requestId }) {
    if (!requestId || this.#cancelled.has(requestId)) return;
    this.#cancelled.add(requestId);
    this.session.cancel(requestId);
  }

  /* Send a turn's question again, or `text` in its place: the server removes the turn and all later ones from the history.
     Resolves to whether it did. */
  /** @param {Turn} turn @param {string} [text] */
  async resend(turn, text = turn.user.text) {
    this.#endHeardTurn();
    this.interrupt();
    const { turns } = this.conversation;
    let end = turns.length;
    const forgotten =
      turn.requestId === null ||
      // What is written or said while the server replies is behind what it removes.
      (await this.#truncate(turn, () => (end = turns.length)));
    this.conversation.drop(turn, end);
    await this.write(text);
    return forgotten;
  }

  /* Drop the conversation and begin a new session. */
  startAnew() {
    this.talk.stop();
    this.speaker.flush();
    this.conversation.clear();
    this.#forget();
    this.session.startAnew();
  }

  /* `asking` is called as the server is asked. */
  /** @param {Turn} turn @param {() => void} asking @returns {Promise<boolean>} */
  async #truncate(turn, asking) {
    await this.conversation.settled(); // it is valid only between requests
    this.#truncated(false);
    asking();
    const { requestId } = turn; // another one, if a new session was asked again meanwhile
    if (requestId === null || !this.session.truncate(requestId)) return false;
    return new Promise((resolve) => (this.#truncating = { requestId, resolve }));
  }

  /** @param {Capabilities} capabilities @returns {SessionConfig} */
  #defaults(capabilities) {
    const { talk, sound, tools } = this;
    const rate = sound.rate === null ? {} : { sample_rate: Math.round(sound.rate) };
    const judges = capabilities.turn_detection_types?.includes("semantic_vad") ?? false;
    const detection = {
      type: judges ? "semantic_vad" : "server_vad",
      interrupt_response: true,
      interrupt_resume: capabilities.transcripts ?? false,
      duck: true,
    };
    const described = Object.entries(tools).map(([name, { description, parameters, async: later }]) => ({
      type: "function",
      ...(later && { async: true }),
      function: { name, description, parameters: parameters ?? { type: "object", properties: {} } },
    }));
    return {
      tools: capabilities.tools && described.length ? described : null,
      overlap: "interrupt",
      turn_detection: talk.mode === "open" && capabilities.turn_detection ? detection : null,
      max_lead_ms: MAY_LISTEN && talk.mode === "hold" ? MAX_LEAD_MS : null,
      input_audio: { format: "pcm16", channels: 1, ...rate },
      output_audio: { format: "pcm16", ...rate },
    };
  }

  // --- the session

  #listenToSession() {
    const { session } = this;
    session.addEventListener("state", ({ detail }) => {
      if (detail.state === "open") {
        this.#openSince = performance.now();
        if (this.sound.context) this.sound.wake().catch(() => {}); // it could not be loaded while the server was away
      }
      if (detail.state === "ended" || detail.state === "refused") this.talk.stop(); // nobody hears it any more
      this.#tellRefusal(detail);
      this.#changed();
    });
    session.addEventListener("created", ({ detail }) => {
      this.capabilities = detail.capabilities;
      this.#sessions += 1;
      this.speaker.flush();
      this.#forget();
      this.#emit("turnend");
      this.conversation.lose(detail.resent);
      this.configure();
    });
    session.addEventListener("undelivered", ({ detail: { turn, code } }) => {
      this.talk.leave(turn);
      this.conversation.fail(this.conversation.turns[turn], code);
    });
    session.addEventListener("resumed", () => {
      this.#resumed = true;
      // What was stopped meanwhile could not be said.
      for (const { unwanted, requestId, answer } of this.conversation.turns) {
        if (unwanted && requestId && answer.finishReason === null) session.cancel(requestId);
      }
      if (this.#truncating) session.truncate(this.#truncating.requestId);
    });
    session.addEventListener("frame", ({ detail }) => this.#frame(detail));
  }

  /* Why there is no session, where only the server's operator can help. */
  /** @param {SessionEvents["state"]} state */
  #tellRefusal({ state, notice }) {
    if (state === "connecting") return;
    const error = state === "waiting" ? notice?.error : undefined;
    const code = error?.code === "origin_not_allowed" ? error.code : "";
    if (error && code && code !== this.#refusal) this.#emit("error", { error });
    this.#refusal = code;
  }

  #forget() {
    this.talk.forgetPlaces();
    this.heardTurn = null;
    this.#lastSpeechMs = -1;
    this.#duck(null);
    this.#sounding.clear();
    this.#truncated(false);
  }

  /** @param {boolean} done */
  #truncated(done) {
    this.#truncating?.resolve(done);
    this.#truncating = null;
  }

  /** @param {any} frame */ // its fields are believed to be those of the protocol
  #frame(frame) {
    const { type } = frame;
    switch (type) {
      case "session_updated":
        this.capabilities = frame.capabilities ?? this.capabilities; // another engine may answer from now on
        return frame.capabilities && this.configure();
      case "speech_started":
        return frame.certain === false ? this.#speechBegins(frame) : this.#speechStarted(frame);
      case "speech_confirmed":
        return this.#speechConfirmed(frame);
      case "speech_dismissed":
        return this.#speechDismissed(frame);
      case "speech_stopped":
        return this.#speechStopped(frame);
      case "backchannel":
        return this.#murmur(frame);
      case "history_truncated":
        return this.#truncated(true);
    }
    if (type === "error" && !frame.error.request_id) {
      if (frame.error.param === "request_id" && this.#truncating) return this.#truncated(false);
      return frame.isOver ? this.#refused(frame) : this.#emit("error", frame);
    }
    if (type === "audio") frame.place = Math.round((frame.startMs / 1000) * (this.#configuredRate ?? 0));
    const turn = this.conversation.apply(frame);
    if (!turn) return;
    if (this.heardTurn?.dropped) this.heardTurn = null; // it is a part of another turn
    if (turn.unwanted && turn.answer.finishReason === null) this.#cancel(turn);
    if (type === "audio" && !turn.unwanted) this.#play(turn, frame);
    if (frame.final) {
      this.speaker.end(turn.number);
      this.#emit("answered", { turn });
      if (frame.finish_reason === "tool_calls" && !turn.unwanted) this.#runTools(turn);
    }
    if (frame.final || type === "audio" || turn.answer.text) this.session.answered(turn.number);
    this.#changed();
  }

  /* No answer comes to a turn: the server refused what ends it. */
  /** @param {Frame} frame */
  #refused({ error, turn: number, isOpen }) {
    const turn = /** @type {KeptTurn} */ (this.conversation.turns[number]);
    this.session.answered(number);
    this.conversation.fail(turn, error.code);
    if (isOpen) {
      turn.unwanted = true; // the server has a part of it, and answers that
      this.session.sendChunk({ modality: "text", payload: new Uint8Array(0), endOfInput: true });
      this.#cancel(turn);
    }
    this.#changed();
  }

  /** @param {KeptTurn} turn @param {{ samples: Int16Array, place: number }} frame */
  #play(turn, { samples, place }) {
    // A server that took the session over may not know of the last sound that the one before sent.
    const known = this.#resumed && this.#configuredRate ? (turn.soundEnd ?? 0) - place : 0;
    if (known > OVERLAP) {
      samples = samples.subarray(known);
      place += known;
    }
    if (!samples.length) return;
    this.#resumed = false;
    turn.soundEnd = place + samples.length;
    this.#sounding.add(turn.number);
    this.#emit("audio", { turn, samples });
    this.conversation.keepSound(turn, "server", samples.slice());
    this.speaker.play(turn.number, samples, place);
    if (this.sound.locked || this.sound.rate === null) this.#emit("locked");
  }

  /* The server hears something, and does not know yet whether it interrupts the answer: that plays on, lowered. It is no
     turn so far. */
  /** @param {Frame} frame */
  #speechBegins({ turn_id: turnId }) {
    if (this.conversation.saidAs(turnId)) return; // a resumed connection repeats it
    if (MAY_LISTEN && this.talk.phase === "off") return; // it was said before the microphone was closed, and nothing follows
    this.#duck(turnId);
    this.#changed();
  }

  /* It does interrupt, from where it began. */
  /** @param {Frame} frame */
  #speechConfirmed(frame) {
    this.#speechStarted(frame);
    this.#duck(null); // behind the flush, or what fades out would get louder
  }

  /* It does not: "mm-hm", or a cough. */
  /** @param {Frame} frame */
  #speechDismissed({ turn_id: turnId }) {
    if (this.#uncertain !== turnId) return;
    this.#duck(null);
    this.#changed();
  }

  /* The server's "mm-hm". It is mixed into what plays, at once. It belongs to no answer, so its playback is not reported. */
  /** @param {Frame} frame */
  #murmur({ payload, format, sample_rate: rate }) {
    const { context } = this.sound;
    if (format !== "pcm16" || context?.state !== "running") return;
    const samples = samplesOf(bytesOfBase64(payload));
    const source = context.createBufferSource();
    const buffer = context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    source.buffer = buffer;
    source.connect(context.destination);
    source.start();
    this.#emit("murmur", { samples });
  }

  /** @param {string | null} turnId */
  #duck(turnId) {
    if (this.#uncertain !== turnId) this.speaker.duck(turnId !== null);
    this.#uncertain = turnId;
  }

  /* With an open microphone the server says when someone begins to speak, and sends nothing more of its answer, unless
     that turns out to have no words. */
  /** @param {Frame} frame */
  #speechStarted(frame) {
    const { audio_ms: audioMs, turn_id: turnId } = frame;
    // A resumed connection repeats what it is not sure of.
    if (turnId ? this.conversation.saidAs(turnId) : audioMs <= this.#lastSpeechMs) return;
    this.#lastSpeechMs = audioMs;
    const turn = this.conversation.hear(this.conversation.begin("heard"), frame);
    this.heardTurn = turn;
    this.conversation.hold(turn);
    this.speaker.flush();
    this.#resumed = false; // an answer that speech stopped may go on from before
    this.#emit("turnstart", { turn });
    this.conversation.heard(turn, {});
    if (MAY_LISTEN && this.talk.phase === "off") this.#endHeardTurn(); // the microphone was closed: no more of it is heard
    this.#changed();
  }

  /** @param {Frame} frame */
  #speechStopped(frame) {
    const { talk, conversation } = this;
    const { audio_ms: audioMs, turn_id: turnId } = frame;
    const turn = turnId ? conversation.saidAs(turnId) : this.heardTurn;
    if (!turn) return;
    conversation.hear(turn, frame);
    const beganAtMs = this.#lastSpeechMs;
    if (turn !== this.heardTurn || audioMs <= beganAtMs) return; // it had its end
    this.#emit("turnend");
    for (const samples of talk.samplesBetween(beganAtMs, audioMs)) conversation.keepSound(turn, "user", samples);
    turn.stoppedAt = performance.now();
    conversation.endSpeech(turn, talk.spokenAt(audioMs) ?? turn.stoppedAt);
    this.heardTurn = null;
    this.#changed();
  }

  /* What is being said into an open microphone ends here, whatever follows. */
  #endHeardTurn() {
    if (!this.heardTurn) return;
    this.session.sendChunk({ modality: "audio", payload: new Uint8Array(0), endOfInput: true });
    this.conversation.endSpeech(this.heardTurn, performance.now());
    this.heardTurn = null;
  }

  /* Reply to the calls of an answer: to each of an `async` tool when that is done, and to all others at once. */
  /** @param {KeptTurn} asking */
  async #runTools(asking) {
    const { calls } = asking.answer;
    const { conversation } = this;
    const replies = conversation.turns.filter(({ kind }) => kind !== "greeting").slice(-MAX_TOOL_TURNS);
    if (replies.filter(({ kind }) => kind === "tool").length === MAX_TOOL_TURNS) return;
    /** @param {ToolCall} call */
    const isLater = ({ name }) => Object.hasOwn(this.tools, name) && this.tools[name].async === true;
    const now = calls.filter((call) => !isLater(call));
    const later = calls.filter(isLater).map((call) => this.#reply(asking, [call], true));
    await Promise.all([...later, ...(now.length ? [this.#reply(asking, now, false)] : [])]);
  }

  /* Send the results of calls: by themselves, or, while someone speaks, as part of what is being said. Those of an `async`
     tool (`isLater`) are told by the server when it suits. */
  /** @param {KeptTurn} asking @param {ToolCall[]} calls @param {boolean} isLater */
  async #reply(asking, calls, isLater) {
    const { conversation, session, talk } = this;
    const asked = this.#sessions;
    const results = await Promise.all(calls.map((call) => this.#run(call)));
    if (asking.unwanted || asking.dropped) return;
    if (asked !== this.#sessions) return conversation.missResults(); // no other session knows of this call
    const alone = isLater || (!this.heardTurn && talk.phase !== "talking");
    const { number: turn, ref } = alone ? conversation.begin("tool") : { number: this.#pageTurn, ref: this.#ref };
    // An end would end what somebody has begun to say, too. A server that names requests ends this one by itself.
    const ends = alone && !isLater && !(conversation.isNamed && session.endsResults && talk.phase === "listening");
    calls.forEach((call, place) => {
      conversation.answerCall(asking, call, results[place]);
      const endOfInput = ends && place === calls.length - 1;
      let payload = new TextEncoder().encode(results[place]);
      if (payload.byteLength > session.maxChunkBytes) payload = new TextEncoder().encode(failure("the result is too long"));
      const sent = session.sendChunk({ modality: "text", payload, toolCallId: call.id, endOfInput, turn, ref });
      if (!sent && turn !== null) conversation.fail(conversation.turns[turn], TOO_MUCH);
    });
    this.#changed();
  }

  /* The result of a call, for the model. What is wrong with a call is a result, too: the model can try again or say so. */
  /** @param {ToolCall} call @returns {Promise<string>} */
  async #run({ name, arguments: given }) {
    if (!Object.hasOwn(this.tools, name)) return `There is no tool ${name}.`;
    try {
      const result = await this.tools[name].run(JSON.parse(given || "{}") ?? {});
      return typeof result === "string" ? result : JSON.stringify(result ?? null);
    } catch (error) {
      return failure(/** @type {Error} */ (error).message);
    }
  }

  /* Stop every answer that is awaited or under way, but that of `exception`, and flush the speaker, which then tells how
     much of the answer was played. */
  /** @param {Turn | null} exception */
  #silence(exception) {
    for (const turn of this.conversation.turns) {
      if (turn === exception || !isOwed(turn)) continue;
      this.session.answered(turn.number);
      this.conversation.stop(turn);
    }
    this.speaker.flush();
  }

  // --- the speaker

  /* What was heard of the answer that plays, by its name: others may have arrived behind it. */
  #acknowledge() {
    const { speaker, conversation } = this;
    const [first] = this.#sounding; // they are played one after the other
    this.session.acknowledge(speaker.playedMs, conversation.turns[speaker.playingId ?? first]?.requestId);
  }

  #listenToSpeaker() {
    const { speaker, session, conversation } = this;
    speaker.addEventListener("started", ({ detail: { id, heardAt } }) => {
      const turn = conversation.turns[id];
      const askedAt = turn.speechEndedAt ?? -Infinity;
      const ms = heardAt - askedAt;
      turn.heardAt ??= heardAt;
      // A turn that waited for a connection says nothing about how fast the server is.
      if (askedAt >= this.#openSince && ms > 0 && turn.firstSoundMs === null) {
        conversation.heard(turn, { firstSoundMs: ms });
        this.#emit("firstsound", { turn, ms });
      }
      this.#changed();
    });
    /** @param {(turn: Turn, playedMs: number) => void} record
      @returns {(event: CustomEvent<{ id: number, playedMs: number }>) => void} */
    const told = (record) => ({ detail: { id, playedMs } }) => {
      const turn = conversation.turns[id];
      this.#sounding.delete(id);
      session.acknowledge(playedMs, turn?.requestId);
      if (turn) record(turn, playedMs);
      this.#changed();
    };
    speaker.addEventListener("overflow", ({ detail: { id } }) => {
      const turn = conversation.turns[id];
      if (turn?.requestId && turn.answer.finishReason === null) session.cancel(turn.requestId);
      this.#emit("error", { error: { code: "too_much_sound", message: "the server sends faster than anybody can listen" } });
    });
    speaker.addEventListener("ended", told((turn, heardMs) => conversation.heard(turn, { heardMs })));
    speaker.addEventListener("flushed", told((turn, heardMs) => conversation.cut(turn, heardMs)));
  }

  #soundChanged() {
    const { sound, speaker, talk } = this;
    if (!sound.context) this.#configuredRate = null;
    else if (sound.rate !== this.#configuredRate) {
      // Also while the context is suspended: audio that arrives meanwhile is queued, and has to have this rate.
      this.#configuredRate = sound.rate;
      this.configure();
      try {
        speaker.attach(sound.context);
      } catch (error) {
        this.#soundFailed(/** @type {Error} */ (error));
      }
    }
    if (sound.locked && (speaker.playing || talk.phase === "talking" || talk.phase === "listening")) this.#emit("locked");
  }

  // --- the microphone

  #listenToTalk() {
    const { talk } = this;
    talk.addEventListener("turn", ({ detail: { turn } }) => {
      this.interrupt(turn);
      this.#pageTurn = turn.number;
      this.#emit("turnstart", { turn });
      this.conversation.heard(turn, {});
    });
    talk.addEventListener("problem", ({ detail: { error } }) => this.#soundFailed(error));
    talk.addEventListener("change", () => {
      if (talk.phase !== "talking" && this.#pageTurn !== null) {
        this.#pageTurn = null;
        this.#emit("turnend");
      }
      if (talk.phase === "off") {
        this.#endHeardTurn(); // closed in the middle of a sentence
        this.#duck(null); // nothing more is heard that could decide it
      }
      this.#changed();
    });
  }

  /** @param {Error} cause */
  #soundFailed(cause) {
    this.#emit("error", { error: { code: cause.name, message: cause.message }, cause });
  }

  #changed() {
    this.#emit("change");
  }

  /** @template {keyof VoiceClientEvents} Name @param {Name} name @param {VoiceClientEvents[Name]} [detail] */
  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/* What a model is told in place of a result. */
/** @param {string} why */
function failure(why) {
  return `This did not work: ${why}`;
}
