// The likely words at each position of a finished text, given all other words: on hover, and for a selected word.
import { weighWords } from "./api.js";
import { byId, make } from "./parts.js";

const PAUSE = 150; // milliseconds that the pointer rests on a word

export class Likely {
  #found = null; // asked once for a text
  #waiting = null;

  constructor(card) {
    this.card = card;
    if (!card.does.offers.alternatives) return;
    card.words.addEventListener("pointerover", (event) => {
      const word = event.target.closest(".word");
      this.hide();
      if (word && event.pointerType === "mouse" && this.#settled) {
        this.#waiting = setTimeout(() => this.#show(word), PAUSE);
      }
    });
    card.words.addEventListener("pointerleave", () => this.hide());
  }

  get #settled() {
    return this.card.generation !== null && this.card.shown === this.card.chosen
      && this.card.does.time() >= this.card.last;
  }

  // What stands at a place: {word, p, likely}; nothing where the model reads the text as other words.
  async at(place) {
    const { generation, frames, last, does } = this.card;
    if (!does.offers.alternatives) return null;
    this.#found ??= weighWords(generation.text).catch(() => ({ words: [] }));
    const { words } = await this.#found;
    return words.length === frames[last].tokens.length ? words[place] : null;
  }

  hide() {
    clearTimeout(this.#waiting);
    byId("likely").hidden = true;
  }

  async #show(word) {
    const place = [...this.card.words.querySelectorAll(".word")].indexOf(word);
    const found = await this.at(place);
    if (!found || !word.matches(":hover")) return;
    const box = byId("likely");
    const own = found.likely.some((one) => one.word === found.word) || found.word === null ? [] : [found];
    const rows = [...found.likely, ...own].map((one) => {
      const row = make("p", one.word === found.word ? "own" : "");
      row.append(make("span", "", one.word), make("span", "share", percent(one.p)));
      row.style.setProperty("--share", one.p);
      return row;
    });
    box.replaceChildren(make("p", "hint", "Likely here, given the other words"), ...rows);
    box.hidden = false;
    const at = word.getBoundingClientRect();
    const left = Math.min(at.left, innerWidth - box.offsetWidth - 8);
    const below = at.bottom + 6 + box.offsetHeight < innerHeight;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${below ? at.bottom + 6 : at.top - box.offsetHeight - 6}px`;
  }

  // Buttons that put a likely word into `field`.
  async offer(place, row, field) {
    row.hidden = true;
    const found = place === undefined ? null : await this.at(place);
    if (!found) return;
    const others = found.likely.filter((one) => one.word !== found.word);
    const buttons = others.map((one) => {
      const button = make("button", "quiet", `${one.word} ${percent(one.p)}`);
      button.type = "button";
      button.addEventListener("click", () => {
        field.value = one.word;
        field.focus();
      });
      return button;
    });
    row.replaceChildren(make("span", "hint", "Likely here:"), ...buttons);
    row.hidden = false;
  }
}

function percent(p) {
  return p < 0.01 ? "< 1 %" : `${Math.round(100 * p)} %`;
}
