/* omni-ws: talk with an omni_ws server from a browser or from Node. VoiceClient does all of it; the other classes are its
   parts, for those who want less. */

export { Conversation, isOwed } from "./client/conversation.js";
export { bytesOf, decodeOutput, encodeInput, FrameError, parseFrame, samplesOf } from "./client/frames.js";
export { Microphone } from "./client/microphone.js";
export { Outgoing } from "./client/outgoing.js";
export { Session } from "./client/session.js";
export { Camera, readImage } from "./client/sights.js";
export { Sound } from "./client/sound.js";
export { Speaker } from "./client/speaker.js";
export { Talk } from "./client/talk.js";
export { VoiceClient } from "./client/voice-client.js";
