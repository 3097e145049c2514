// A diffusion model and a left-to-right model write one text each at the same time, if the server has both.
import { stream } from "./api.js";
import { byId, make } from "./parts.js";
import { Player } from "./player.js";

export class Race {
  #running = null;

  constructor(models, read) {
    const [diffusion, rival] = [false, true].map((side) => models.find((model) => model.left_to_right === side));
    if (!diffusion || !rival) return;
    Object.assign(this, { models: [diffusion, rival], read });
    byId("race").hidden = false;
    byId("race").addEventListener("click", () => this.#start());
    byId("race-close").addEventListener("click", () => {
      this.#running?.abort();
      byId("races").hidden = true;
    });
  }

  #start() {
    this.#running?.abort();
    this.#running = new AbortController();
    const [diffusion, rival] = this.models.map((model) => `${model.name} (${size(model)})`);
    const { seed = 0, steps = this.models[0].steps } = this.read();
    byId("race-about").textContent = `${diffusion} refines all words together in ${steps} steps; ${rival} writes one `
      + "word per step. Both write without constraints and share this server's processor.";
    byId("races").hidden = false;
    byId("races").scrollIntoView({ block: "nearest" });
    const cards = this.models.map((model, i) => this.#run(model, i === 0 ? { n: 1, seed, steps } : { n: 1, seed }));
    byId("racers").replaceChildren(...cards);
  }

  #run(model, request) {
    const card = make("article", "card");
    const head = make("header");
    const told = make("span", "sureness", "waiting");
    const words = make("p", "text");
    head.append(make("h2", "", `${model.name} · ${model.left_to_right ? "left to right" : "all words at once"}`), told);
    card.append(head, words);
    this.#follow(model, request, words, told).catch((fault) => {
      told.textContent = fault.name === "AbortError" ? "stopped" : fault.message;
    });
    return card;
  }

  async #follow(model, request, words, told) {
    const { signal } = this.#running;
    let begun = performance.now(), steps = 0;
    const tell = () => {
      const seconds = ((performance.now() - begun) / 1000).toFixed(1);
      told.textContent = `${steps} ${steps === 1 ? "step" : "steps"} · ${seconds} s`;
    };
    for await (const [name, data] of stream(request, signal, undefined, model.name)) {
      if (name === "queued") begun = performance.now();
      else if (name === "frame") {
        const { space, ...frame } = data.frames.at(-1);
        steps = frame.step + 1;
        Player.draw(words, { frames: [{ ...frame, spaces: space }] }, 0);
        tell();
      } else if (name === "text") {
        steps = data.denoiser_calls;
        Player.draw(words, { frames: [], text: data.text }, 0);
        tell();
        told.textContent += " · finished";
      }
    }
  }
}

function size({ parameters }) {
  return `${(parameters / 1e6).toFixed(1)}M parameters`;
}
