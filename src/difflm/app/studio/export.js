// Export of texts: a player, a video, JSON, and the request as a link, a command and Python code.
import { player } from "./api.js";
import { film, filmKind } from "./film.js";
import { byId, copyText, make } from "./parts.js";
import { command, python, toHash } from "./request.js";

export class Export {
  constructor(several, model, result) {
    Object.assign(this, { several, model, result });
    const dialog = byId("export-dialog");
    byId("export").addEventListener("click", () => this.#open());
    byId("export-close").addEventListener("click", () => dialog.close());
    byId("export-player").addEventListener("click", () => this.#savePlayer());
    byId("export-film-row").hidden = !filmKind();
    byId("export-film").addEventListener("click", () => this.#saveFilm());
    byId("export-json").addEventListener("click", () => this.#saveJson());
    for (const button of dialog.querySelectorAll("[data-copies]")) {
      button.addEventListener("click", () => copyText(byId(button.dataset.copies).textContent, button));
    }
  }

  #open() {
    const { request } = this.result();
    byId("export-link").textContent = new URL(toHash(request, this.several ? this.model : ""), location.href);
    byId("export-command").textContent = command(this.model, request);
    byId("export-python").textContent = python(this.model, request);
    this.#tell("");
    byId("export-dialog").showModal();
  }

  #tell(text) {
    byId("export-note").textContent = text;
  }

  async #savePlayer() {
    const { request } = this.result();
    this.#tell("Making the player …");
    try {
      const wait = (seconds) => this.#tell(`The server is busy; trying again in ${seconds} s.`);
      save(await player(request, undefined, wait), `${this.model}-${request.seed ?? 0}.html`);
      this.#tell("Saved. Open it in any browser.");
    } catch (fault) {
      this.#tell(fault.message);
    }
  }

  async #saveFilm() {
    const { request, stage } = this.result();
    const button = byId("export-film");
    this.#tell("Recording for eight seconds …");
    button.disabled = true;
    try {
      const texts = stage.cards.filter((card) => card.frames.length).map((card) => card.text);
      const made = await film(texts, `${this.model}: ${byId("intro").textContent.split(". ")[0]}.`);
      save(made, `${this.model}-${request.seed ?? 0}.${made.type.endsWith("mp4") ? "mp4" : "webm"}`);
      this.#tell("Saved.");
    } catch (fault) {
      this.#tell(`This browser could not record it: ${fault.message}`);
    } finally {
      button.disabled = false;
    }
  }

  #saveJson() {
    const { request, texts, kept } = this.result();
    const content = JSON.stringify({ model: this.model, request, texts, kept }, null, 2);
    save(new Blob([content], { type: "application/json" }), `${this.model}-${request.seed ?? 0}.json`);
    this.#tell("Saved.");
  }
}

function save(blob, name) {
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
