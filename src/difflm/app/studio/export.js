// Texts out of the page: a player, JSON, and the same request as a link, a command and Python.
import { player } from "./api.js";
import { byId, copyText, make } from "./parts.js";
import { command, python, toHash } from "./request.js";

export class Export {
  constructor(model, result) {
    Object.assign(this, { model, result });
    const dialog = byId("export-dialog");
    byId("export").addEventListener("click", () => this.#open());
    byId("export-close").addEventListener("click", () => dialog.close());
    byId("export-player").addEventListener("click", () => this.#savePlayer());
    byId("export-json").addEventListener("click", () => this.#saveJson());
    for (const button of dialog.querySelectorAll("[data-copies]")) {
      button.addEventListener("click", () => copyText(byId(button.dataset.copies).textContent, button));
    }
  }

  #open() {
    const { request } = this.result();
    byId("export-link").textContent = new URL(toHash(request), location.href);
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
    this.#tell("Writing the player …");
    try {
      const wait = (seconds) => this.#tell(`The server is busy; again in ${seconds} s.`);
      save(await player(request, undefined, wait), `${this.model}-${request.seed ?? 0}.html`);
      this.#tell("Saved. Open it in any browser.");
    } catch (fault) {
      this.#tell(fault.message);
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
