/* The page on a phone: a QR code of its address, where the server has one for the local network (--lan). */

import { element } from "./page.js";
import { currentKey } from "./settings.js";

/* Offer the code among the settings. It has the key of this page, and so it is shown only when it is asked for. */
export async function offerPhone() {
  const key = currentKey();
  const response = await fetch(new URL("phone", document.baseURI), { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const { svg = null } = response.ok ? await response.json() : {};
  element("phone").hidden = svg === null;
  element("phone-key").hidden = !key;
  element("open-phone").onclick = () => {
    const opens = element("phone-box").hidden;
    const image = element("phone-code");
    URL.revokeObjectURL(image.src);
    if (opens) image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
    else image.removeAttribute("src");
    element("phone-box").hidden = !opens;
    element("open-phone").setAttribute("aria-expanded", String(opens));
  };
}
