/* Microphones that are plugged in while one talks. */

/* Watches the devices. `found(microphone)` is given one that was not there before, as the browser describes it: it tells the
   names of devices only to pages that were let use them. */
export async function watchMicrophones(found) {
  const { mediaDevices } = navigator;
  if (!mediaDevices?.enumerateDevices) return;
  let known = null;
  const look = async () => {
    const devices = await mediaDevices.enumerateDevices().catch(() => []);
    const here = devices.filter(({ kind, deviceId, label }) => kind === "audioinput" && label && !["", "default", "communications"].includes(deviceId));
    const before = known;
    known = new Set(here.map(({ deviceId }) => deviceId));
    if (!before?.size) return; // their names are told only now
    for (const one of here) if (!before.has(one.deviceId)) found(one);
  };
  mediaDevices.addEventListener?.("devicechange", look);
  await look();
  return look;
}
