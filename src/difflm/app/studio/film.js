// The texts on the stage as a video: drawn on a canvas, and recorded by the browser while it plays.
import { make } from "./parts.js";
import { Player } from "./player.js";

const [WIDTH, EDGE, GAP, SIZE, LINE] = [1280, 48, 40, 27, 44];
const [PLAYED, HELD] = [6000, 2000]; // milliseconds: from noise to text, and of the finished texts
const KINDS = ["video/webm;codecs=vp9", "video/webm", "video/mp4"];

export const filmKind = () => globalThis.MediaRecorder && KINDS.find((kind) => MediaRecorder.isTypeSupported(kind));

// A Blob; `texts` are those of the player: {text, frames}.
export async function film(texts, sentence) {
  const scene = new Scene(texts, sentence);
  const recorder = new MediaRecorder(scene.canvas.captureStream(30), { mimeType: filmKind(), videoBitsPerSecond: 4e6 });
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve));
  recorder.start();
  const steps = Math.max(...texts.map(({ frames }) => frames.length));
  for (const begun = performance.now(); ;) {
    const passed = (performance.now() - begun) / PLAYED;
    scene.draw(Math.min(steps - 1, Math.floor(passed * steps)));
    if (passed > 1 + HELD / PLAYED) break;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  recorder.stop();
  await ended;
  return new Blob(parts, { type: filmKind().split(";")[0] });
}

class Scene {
  constructor(texts, sentence) {
    Object.assign(this, { texts, sentence, columns: texts.length > 2 ? 2 : 1 });
    this.room = (WIDTH - 2 * EDGE - (this.columns - 1) * GAP) / this.columns;
    this.canvas = make("canvas");
    this.context = this.canvas.getContext("2d");
    this.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
    this.font = getComputedStyle(document.body).fontFamily;
    this.#type(SIZE);
    this.heights = texts.map((text) => Math.max(...text.frames.map((_, step) => this.#lay(text, step).height)));
    const rows = this.#rows();
    Object.assign(this.canvas, { width: WIDTH, height: 2 * Math.ceil((rows.at(-1).end + 2.5 * LINE) / 2) }); // codecs: even
  }

  #type(size, weight = 400) {
    this.context.font = `${weight} ${size}px ${this.font}`;
  }

  // Where each row of texts begins and ends.
  #rows() {
    const found = [];
    for (let i = 0; i < this.texts.length; i += this.columns) {
      const begin = found.length ? found.at(-1).end + GAP : EDGE + LINE + GAP;
      found.push({ begin, end: begin + Math.max(...this.heights.slice(i, i + this.columns)) });
    }
    return found;
  }

  // The words of a draft with their places, broken into lines.
  #lay(text, step) {
    const frame = Player.at(text, step);
    const blank = this.context.measureText(" ").width;
    let [x, y] = [0, 0];
    const words = frame.tokens.map((token, i) => {
      const spaced = frame.spaces[i] || token.startsWith(" ");
      const word = token.trimStart();
      const width = this.context.measureText(word).width;
      if (spaced && x > 0) x += blank;
      if (x + width > this.room && x > 0) [x, y] = [0, y + LINE];
      const placed = { word, x, y, sure: frame.confidence[i] };
      x += width;
      return placed;
    });
    return { words, height: y + LINE };
  }

  draw(step) {
    const { context, colour } = this;
    context.fillStyle = colour("page");
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.#type(SIZE, 650);
    context.fillStyle = colour("ink");
    context.fillText("difflm", EDGE, EDGE + SIZE);
    this.#type(19);
    context.fillStyle = colour("muted");
    context.fillText(this.sentence, EDGE, this.canvas.height - EDGE + 8);
    this.#type(SIZE);
    const rows = this.#rows();
    this.texts.forEach((text, i) => {
      const left = EDGE + (i % this.columns) * (this.room + GAP);
      const top = rows[Math.floor(i / this.columns)].begin + SIZE;
      const ended = step >= text.frames.length - 1;
      for (const { word, x, y, sure } of this.#lay(text, step).words) {
        context.fillStyle = colour(ended ? "c7" : `c${Math.min(7, Math.floor(8 * sure))}`);
        context.fillText(word, left + x, top + y);
      }
    });
    const steps = Math.max(...this.texts.map(({ frames }) => frames.length));
    context.fillStyle = colour("accent");
    context.fillRect(0, this.canvas.height - 6, (this.canvas.width * (step + 1)) / steps, 6);
  }
}
