/* Types of omni-ws/call. */

import { VoiceClient, VoiceClientOptions } from "./client.js";

/* A VoiceClient whose speech goes by WebRTC. It has no `say`, `show`, resume or times of words. */
export class VoiceCall extends VoiceClient {
  constructor(options: VoiceClientOptions);
  say(): never;
}
