/* Pictures for engines that see: dropped, pasted or chosen ones, and frames of the camera or the screen. Everything is sent
   as JPEG, no larger than it is useful. */

const LONGEST_SIDE = 1280;
const CAMERA_SIDE = 640;
const QUALITY = 0.82;

/* A file of a person: { payload, url }. Raises an Error where it is no picture that this browser can read. */
/** @param {Blob} file */
export async function readImage(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    const name = file instanceof File && file.name ? file.name : "This";
    throw new Error(`${name} is no picture that the browser can read.`);
  }
  return toJpeg(bitmap, bitmap.width, bitmap.height, LONGEST_SIDE);
}

export class Camera {
  /** @type {MediaStream | null} */
  #stream = null;
  #video;
  #side = CAMERA_SIDE;
  /* What is called when it ends by itself: the browser has a button of its own for a screen. */
  onended = () => {};

  /** @param {HTMLVideoElement} video */
  constructor(video) {
    this.#video = video;
  }

  get isOn() {
    return this.#stream !== null;
  }

  /* Whether this browser shows screens, which those of phones do not. */
  static get canShareScreen() {
    return Boolean(navigator.mediaDevices?.getDisplayMedia);
  }

  /** @param {"camera" | "screen"} [source] */
  async open(source = "camera") {
    const devices = navigator.mediaDevices;
    if (!devices?.getUserMedia) throw new Error("Browsers give the camera only to pages over https.");
    const screen = source === "screen";
    this.#stream = screen
      ? await devices.getDisplayMedia({ video: { frameRate: 5 } })
      : await devices.getUserMedia({ video: { facingMode: "environment", width: 1280 } });
    this.#side = screen ? LONGEST_SIDE : CAMERA_SIDE; // text on a screen has to stay legible
    for (const track of this.#stream.getVideoTracks()) track.onended = () => this.onended();
    this.#video.srcObject = this.#stream;
    this.#video.hidden = false;
    await this.#video.play();
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = null;
    this.#video.srcObject = null;
    this.#video.hidden = true;
  }

  /* What it sees now, as JPEG bytes. It is drawn at once, and dropped where its turn is over before it is encoded:
     a picture that comes late would open a turn of its own. */
  /** @param {() => boolean} stillWanted */
  async frame(stillWanted) {
    const { videoWidth, videoHeight } = this.#video;
    if (videoWidth === 0) return null;
    const { payload, url } = await toJpeg(this.#video, videoWidth, videoHeight, this.#side);
    URL.revokeObjectURL(url);
    return stillWanted() ? payload : null;
  }
}

/** @param {CanvasImageSource} source @param {number} width @param {number} height @param {number} longest */
async function toJpeg(source, width, height, longest) {
  const scale = Math.min(1, longest / Math.max(width, height, 1));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)));
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("the browser cannot draw a picture");
  pen.fillStyle = "#fff"; // JPEG has no transparency
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, 0, canvas.width, canvas.height);
  const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
  return { payload: new Uint8Array(await blob.arrayBuffer()), url: URL.createObjectURL(blob) };
}
