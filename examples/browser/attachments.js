/* Pictures that go with the next turn, and the camera or the screen, whose frames go with every turn while it is on. */

import { Camera, readImage } from "../client.js";

const FRAME_MS = 1000;
const MAX_PICTURES = 8;

export class Attachments {
  #waiting = []; // { payload, url }
  #timer = null;
  #source = null; // "camera" or "screen", while one of them is on
  #asking = false;
  #turns = 0;
  #inTurn = false;

  /* `send(modality, payload)` sends a chunk of the turn of the moment; `complain(text)` tells the person. */
  constructor({ place, video, cameraButton, screenButton, imageButton, imageInput, dropArea, send, complain }) {
    Object.assign(this, { place, imageButton, send, complain });
    this.frameButtons = { camera: cameraButton, screen: screenButton };
    this.camera = new Camera(video);
    this.camera.onended = () => this.#turnOff();
    this.modalities = [];
    imageButton.onclick = () => imageInput.click();
    imageInput.onchange = () => {
      this.add([...imageInput.files]);
      imageInput.value = "";
    };
    for (const [source, button] of Object.entries(this.frameButtons)) button.onclick = () => this.#toggle(source);
    dropArea.addEventListener("dragover", (event) => {
      if (!this.#sees) return;
      event.preventDefault();
      dropArea.classList.add("dropping");
    });
    dropArea.addEventListener("dragleave", () => dropArea.classList.remove("dropping"));
    dropArea.addEventListener("drop", (event) => {
      dropArea.classList.remove("dropping");
      if (!this.#sees) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    document.addEventListener("paste", ({ clipboardData }) => this.#sees && this.add(clipboardData.files));
  }

  /* What the engine takes: without pictures among it, nothing of this is shown. */
  allow(modalities) {
    this.modalities = modalities;
    this.imageButton.hidden = !modalities.includes("image");
    this.frameButtons.camera.hidden = !this.#frameModality;
    this.frameButtons.screen.hidden = !this.#frameModality || !Camera.canShareScreen;
    if (!this.#frameModality) this.#turnOff();
  }

  async add(files) {
    for (const file of files) {
      if (this.#waiting.length >= MAX_PICTURES) return this.complain(`No more than ${MAX_PICTURES} pictures at once.`);
      try {
        this.#waiting.push(await readImage(file));
      } catch (error) {
        this.complain(error.message);
      }
    }
    this.#show();
  }

  /* A turn begins: send what waits, and a frame now and every second until `endTurn`. The addresses of what was sent. */
  beginTurn() {
    const sent = this.#waiting.splice(0);
    for (const { payload } of sent) this.send("image", payload);
    this.#show();
    this.#turns += 1;
    this.#inTurn = true;
    if (this.camera.isOn) {
      this.#sendFrame();
      clearInterval(this.#timer);
      // An engine that takes single pictures gets one; a film is for those that watch.
      if (this.#frameModality === "video") this.#timer = setInterval(() => this.#sendFrame(), FRAME_MS);
    }
    return sent.map(({ url }) => url);
  }

  endTurn() {
    this.#inTurn = false;
    clearInterval(this.#timer);
    this.#timer = null;
  }

  /* What the camera or the screen shows now goes with a turn that is written, as a picture. */
  async look() {
    if (!this.camera.isOn || !this.#sees || this.#waiting.length >= MAX_PICTURES) return;
    const payload = await this.camera.frame(() => true);
    if (payload) this.#waiting.push({ payload, url: URL.createObjectURL(new Blob([payload], { type: "image/jpeg" })) });
  }

  get #sees() {
    return this.modalities.includes("image");
  }

  get #frameModality() {
    return ["video", "image"].find((modality) => this.modalities.includes(modality)) ?? null;
  }

  async #sendFrame() {
    const turn = this.#turns;
    const modality = this.#frameModality;
    const payload = await this.camera.frame(() => this.#inTurn && this.#turns === turn);
    if (payload) this.send(modality, payload);
  }

  async #toggle(source) {
    if (this.#asking) return; // the browser still asks the person
    const wasOn = this.#source === source;
    this.#turnOff();
    if (wasOn) return;
    this.#asking = true;
    try {
      await this.camera.open(source);
      this.#source = source;
    } catch (error) {
      this.camera.close();
      const refused = error.name === "NotAllowedError";
      if (refused && source === "screen") return; // by the person, in the browser's own question
      this.complain(refused ? "The browser does not let this page use the camera." : `No ${source}: ${error.message}`);
    } finally {
      this.#asking = false;
    }
    this.#showSource();
  }

  #turnOff() {
    if (this.camera.isOn) {
      this.endTurn();
      this.camera.close();
    }
    this.#source = null;
    this.#showSource();
  }

  #showSource() {
    for (const [source, button] of Object.entries(this.frameButtons)) button.setAttribute("aria-pressed", String(this.#source === source));
  }

  #show() {
    this.place.hidden = this.#waiting.length === 0;
    this.place.replaceChildren(
      ...this.#waiting.map((picture) => {
        const button = document.createElement("button");
        const image = document.createElement("img");
        button.type = "button";
        button.title = "Remove this picture";
        button.setAttribute("aria-label", button.title);
        image.src = picture.url;
        image.alt = "";
        button.append(image);
        button.onclick = () => {
          this.#waiting = this.#waiting.filter((one) => one !== picture);
          URL.revokeObjectURL(picture.url);
          this.#show();
        };
        return button;
      }),
    );
  }
}
