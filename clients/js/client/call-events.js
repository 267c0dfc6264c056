/* The events of a call as frames of the native protocol. A request is named by the item that asks it. */

/** @import { Frame, ServerError } from "../client.js" */
/** @import { CallSpeaker } from "./call-speaker.js" */

/** What a call does with them: `tell` is given the frames, `ask` asks for a response to an item, and `placeOf` says where
 the page has what the server has at this millisecond of the audio.
 @typedef {{ tell(frame: Frame): void, ask(id: string): void, placeOf(audioMs: number): number, detectsTurns(): boolean }} Call */

/* Errors that are ignored: there was no response to cancel, or no audio to commit. */
const HARMLESS = ["response_cancel_not_active", "input_audio_buffer_commit_empty"];
/** @type {Record<string, string>} */
const FINISH_REASONS = { completed: "stop", cancelled: "cancelled", incomplete: "length", failed: "error" };

export class CallEvents {
  #speaker;
  #call;
  /* By the ids of responses that go on: the request, and the items of its tool calls. */
  /** @type {Map<string, { request: string, calls: string[] }>} */
  #responses = new Map();
  /* What was said into the open microphone, until it is answered. */
  /** @type {string | null} */
  #heard = null;
  /* The conversation as the server has it. */
  /** @type {string[]} */
  #items = [];
  #empty = 0;
  /* The names of turns by the items that ask them, and those of turns of the button that are to become items: the server
     does these one after the other. */
  /** @type {Map<string, string | null>} */
  #refs = new Map();
  /** @type {string[]} */
  #commits = [];

  /** @param {CallSpeaker} speaker @param {Call} call */
  constructor(speaker, call) {
    this.#speaker = speaker;
    this.#call = call;
  }

  clear() {
    this.#responses.clear();
    this.#heard = null;
    this.#items = [];
    this.#refs.clear();
    this.#commits = [];
  }

  /* An item asks the turn of this name. */
  /** @param {string} id @param {string | null} ref */
  asks(id, ref) {
    this.#refs.set(id, ref);
  }

  /* The turn of this name has been said with the button, and becomes an item. */
  /** @param {string} ref */
  commits(ref) {
    this.#commits.push(ref);
  }

  /* The response that goes on for a request. */
  /** @param {string} requestId */
  responseTo(requestId) {
    return [...this.#responses].find(([, { request }]) => request === requestId)?.[0];
  }

  /* The items from a request on, which are to be forgotten. */
  /** @param {string} requestId */
  takeItems(requestId) {
    const place = this.#items.indexOf(requestId);
    return place < 0 ? [] : this.#items.splice(place);
  }

  /** @param {Frame} event */
  read(event) {
    const { type, item_id: itemId, response_id: responseId, delta } = event;
    const { tell, ask, placeOf, detectsTurns } = this.#call;
    switch (type) {
      case "input_audio_buffer.speech_started":
        return tell({ type: "speech_started", audio_ms: placeOf(event.audio_start_ms), turn_id: itemId, request_id: itemId });
      case "input_audio_buffer.speech_stopped":
        return tell({ type: "speech_stopped", audio_ms: placeOf(event.audio_end_ms), turn_id: itemId, request_id: itemId });
      case "input_audio_buffer.committed":
        if (detectsTurns()) return this.#committed(itemId);
        this.#refs.set(itemId, this.#commits.shift() ?? null);
        return ask(itemId);
      case "conversation.item.added":
        return void this.#items.push(event.item.id);
      case "conversation.item.input_audio_transcription.delta":
        return this.#output(itemId, { modality: "transcript", text: delta });
      case "response.created":
        return this.#begins(event.response);
      case "response.output_text.delta":
      case "response.output_audio_transcript.delta":
        return this.#output(this.#responses.get(responseId)?.request, { modality: "text", text: delta });
      case "response.output_item.added":
      case "response.function_call_arguments.delta":
        return this.#toolCall(event);
      case "response.done":
        return this.#ends(event.response);
      case "output_audio_buffer.started":
        return this.#speaker.begin(responseId);
      case "output_audio_buffer.stopped":
        return this.#speaker.end();
      case "output_audio_buffer.cleared":
        return this.#speaker.flush();
      case "error":
        return this.#complain(event.error);
    }
  }

  /* The server has heard a turn. The one before, if it had no response, had no words. */
  /** @param {string} itemId */
  #committed(itemId) {
    if (this.#heard !== null) this.#final(this.#heard, "stop");
    this.#heard = itemId;
  }

  /** @param {{ id: string, metadata: { asked?: string, trigger?: string } | null }} response */
  #begins({ id, metadata }) {
    const request = metadata?.asked ?? (metadata?.trigger ? id : (this.#heard ?? id)); // a trigger: it speaks unasked
    if (request === this.#heard) this.#heard = null;
    this.#responses.set(id, { request, calls: [] });
    this.#speaker.expect(id, request);
    const trigger = request === id ? "greeting" : "asked";
    this.#call.tell({ type: "response_started", request_id: request, trigger, ref: this.#refs.get(request) });
  }

  /** @param {Frame} event */
  #toolCall({ response_id: responseId, item_id: itemId, item, delta = "" }) {
    const response = this.#responses.get(responseId);
    if (!response || (item && item.type !== "function_call")) return;
    if (item) response.calls.push(item.id);
    const index = response.calls.indexOf(item?.id ?? itemId);
    this.#output(response.request, { modality: "tool_call", index, id: item?.call_id, name: item?.name, arguments: delta });
  }

  /** @param {{ id: string, status: string, status_details: { error?: ServerError } | null, usage: Record<string, number>, times?: Record<string, number> }} response */
  #ends({ id, status, status_details: details, usage, times }) {
    const response = this.#responses.get(id);
    if (!response) return;
    this.#responses.delete(id);
    const { request, calls } = response;
    if (details?.error) this.#call.tell({ type: "error", error: { ...details.error, request_id: request } });
    this.#final(request, calls.length && status === "completed" ? "tool_calls" : FINISH_REASONS[status], usage, times);
  }

  /** @param {ServerError} error */
  #complain(error) {
    if (error.code === "input_audio_buffer_commit_empty" && !this.#call.detectsTurns()) {
      const request = `empty_${this.#empty++}`;
      const ref = this.#commits.shift();
      this.#call.tell({ type: "error", error: { ...error, code: "empty_input", request_id: request, ref } });
      return this.#final(request, "error");
    }
    if (!HARMLESS.includes(error.code)) this.#call.tell({ type: "error", error });
  }

  /** @param {string | undefined} request @param {object} content */
  #output(request, content) {
    if (request !== undefined) this.#call.tell({ type: "output_chunk", request_id: request, ...content });
  }

  /** @param {string} request @param {string} reason @param {Record<string, number>} [usage] @param {Record<string, number>} [times] */
  #final(request, reason, usage, times) {
    this.#output(request, { final: true, finish_reason: reason, usage, times });
  }
}
