/* omni-ws/react: a conversation as a hook. */

/** @import { ChatOptions } from "./chat.js" */
/** @import { VoiceChatOfHook } from "./react.js" */

import { useEffect, useMemo, useState, useSyncExternalStore } from "react";
import { serverOf, VoiceChat } from "./widget/chat.js";

/* The conversation ends with the component. Other options than `url` may change while it goes on. */
/** @param {ChatOptions} options @returns {VoiceChatOfHook} */
export function useVoiceChat(options) {
  const url = serverOf(options.url);
  const [{ chat, of }, setChat] = useState(() => ({ chat: new VoiceChat(options), of: url }));
  if (of !== url) setChat({ chat: new VoiceChat(options), of: url });
  useEffect(() => chat.configure(options));
  useEffect(() => () => chat.close(), [chat]);
  const actions = useMemo(() => actionsOf(chat), [chat]);
  return { ...useSyncExternalStore(actions.subscribe, actions.read, actions.read), ...actions.given };
}

/* What stays the same as long as the conversation does. */
/** @param {VoiceChat} chat */
function actionsOf(chat) {
  return {
    /** @param {() => void} changed */
    subscribe: (changed) => {
      chat.addEventListener("change", changed);
      return () => chat.removeEventListener("change", changed);
    },
    read: () => chat.shown,
    given: {
      chat,
      levels: chat.levels,
      start: () => chat.start(),
      stop: () => chat.stop(),
      mute: (/** @type {boolean | undefined} */ muted) => chat.mute(muted),
      send: (/** @type {string} */ text) => chat.send(text),
    },
  };
}
