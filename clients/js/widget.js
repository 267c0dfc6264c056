/* omni-ws/widget: the element <voice-chat>. A server gives it, with all that it needs, as one file at /widget.js. */

import { VoiceChatElement } from "./widget/element.js";

if (globalThis.customElements && !customElements.get("voice-chat")) customElements.define("voice-chat", VoiceChatElement);

export { VoiceChatElement };
