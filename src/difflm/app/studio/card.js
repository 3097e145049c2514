// One text on the stage: it forms, gets its marks, and its words can be selected and edited.
import { lacking } from "./differ.js";
import { Hand } from "./hand.js";
import { Likely } from "./likely.js";
import { Player } from "./player.js";
import { byId, controlItem, copyText, make, verdict } from "./parts.js";

export class Card {
  constructor(number, alone, asked, each, source, does) {
    Object.assign(this, { number, source, does, head: -1, generation: null, shown: 0 });
    this.candidates = Array.from({ length: each }, () => ({ frames: [], text: undefined }));
    this.element = byId("card").content.firstElementChild.cloneNode(true);
    this.words = this.find(".text");
    this.title = alone ? "text" : `text ${number + 1}`;
    this.find("h2").textContent = this.title;
    this.find(".controls").append(...asked.map(waitingItem));
    this.#noise();
    this.likely = new Likely(this);
    this.hand = new Hand(this);
    const { infill, edit, contains } = does.offers;
    this.find(".edit").hidden = !infill && !edit && !contains;
    this.#wire();
    if (each > 1) this.#siblings();
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  get text() {
    return this.candidates[this.shown];
  }

  get frames() {
    return this.text.frames;
  }

  get last() {
    return this.frames.length - 1;
  }

  get settled() {
    return this.generation !== null && this.head >= this.last;
  }

  // ---- while it forms ----

  // Before the first frame: noise.
  #noise() {
    let x = this.number + 1;
    const next = (most) => {
      x = (x * 16807) % 2147483647;
      return x % most;
    };
    const words = Array.from({ length: 14 + next(10) }, () => "·".repeat(2 + next(7)));
    this.words.replaceChildren(make("span", "noise", words.join(" ")));
  }

  add(candidate, frame) {
    const { space, ...rest } = frame;
    const kept = { ...rest, spaces: space };
    kept.sure = Player.sureness(kept);
    this.candidates[candidate].frames.push(kept);
  }

  // A faster model's text, until its own is finished.
  showPreview(text, label) {
    if (this.generation) return;
    const about = make("span", "", label);
    about.lang = "en";
    this.find(".preview").replaceChildren(about, text);
    this.find(".preview").hidden = false;
  }

  finish(generation) {
    this.generation = generation;
    const last = (one) => Player.upToTheEnd(one.frames.at(-1), generation.text);
    const spelt = (one) => one.frames.length > 0 && Player.written(last(one)) === generation.text;
    this.shown = Math.max(0, this.candidates.findIndex(spelt));
    this.text.text = generation.text;
    if (this.last >= 0) this.frames[this.last] = last(this.text);
    this.chosen = this.shown;
    this.head = Math.min(this.head, this.last - 1); // what it shows was drawn before: as a draft, or of another candidate
    this.#markSiblings();
  }

  // One more frame of those that have come, or several where it lags behind; true while there is more to show.
  // Nothing is animated: drawn without a GPU, four texts would take 7.0 s of processor time from the model instead of 2.5 s.
  advance() {
    if (this.head < this.last) {
      this.head += Math.max(1, Math.ceil((this.last - this.head) / 15));
      this.draw(this.head);
    }
    if (this.settled) this.mark();
    return this.head < this.last;
  }

  // To its newest draft without those between; somebody may be looking at an earlier one.
  skip(step = this.last) {
    if (this.head < this.last) this.draw(step);
    this.head = this.last;
    if (this.settled) this.mark();
  }

  draw(step, animate = false) {
    const frame = Player.at(this.text, step);
    if (!frame && this.text.text === undefined) return;
    Player.draw(this.words, this.text, step, animate);
    const ended = this.generation !== null && step >= this.last;
    this.element.classList.toggle("early", this.generation !== null && !ended); // the marks are of the finished text
    if (this.source && frame) this.#compare(ended);
    // Of a finished text it would vouch for what is written, of which it knows nothing.
    const share = ended ? 0 : frame?.sure ?? 0;
    this.find(".sureness").textContent = share ? `${Math.floor(share * 100)} % sure` : "";
    this.element.style.setProperty("--sure", share.toFixed(3));
    const height = this.words.offsetHeight;
    if (height > (this.room ?? 0)) this.words.style.minHeight = `${(this.room = height)}px`; // nothing below it jumps
  }

  // For a rewritten text: which words its source does not have.
  #compare(finished) {
    const spans = [...this.words.querySelectorAll(".word")];
    const { tokens, spaces } = this.frames[this.last];
    const groups = []; // tokens that are written without a space between them
    tokens.forEach((token, i) => (i === 0 || spaces[i] ? groups.push([i]) : groups.at(-1).push(i)));
    const fresh = lacking(this.source.split(/\s+/), groups.map((group) => group.map((i) => tokens[i]).join("")));
    groups.forEach((group, g) => group.forEach((i) => spans[i]?.classList.toggle("fresh", finished && fresh[g])));
  }

  freeRoom() {
    this.room = 0;
    this.words.style.minHeight = "";
  }

  mark() {
    if (this.element.classList.contains("done")) return;
    this.element.classList.add("done");
    this.find(".preview").hidden = true;
    this.find(".controls").replaceChildren(...this.generation.controls.map(checkedItem));
  }

  // Never finished: what was asked of it stays open.
  stop() {
    if (this.generation) return;
    this.find(".preview").hidden = true;
    this.element.classList.add("stopped");
    this.find(".sureness").textContent = "stopped";
  }

  // ---- candidates of which one was chosen ----

  #siblings() {
    const buttons = this.candidates.map((_, i) => {
      const button = make("button", "", String(i + 1));
      button.type = "button";
      button.addEventListener("click", () => {
        this.shown = i;
        this.hand.leave();
        this.draw(this.does.time());
        this.#markSiblings();
      });
      return button;
    });
    this.find(".siblings").append(...buttons);
    this.#markSiblings();
  }

  #markSiblings() {
    [...this.find(".siblings").children].forEach((button, i) => {
      button.setAttribute("aria-pressed", String(i === this.shown));
      button.classList.toggle("chosen", i === this.chosen);
      button.title = i === this.chosen ? `candidate ${i + 1}, chosen` : `candidate ${i + 1}`;
      button.setAttribute("aria-label", button.title);
    });
    const other = this.chosen !== undefined && this.shown !== this.chosen;
    this.element.classList.toggle("other", other); // the marks are of the chosen one
  }

  // ---- what can be done with it ----

  get written() {
    return this.text.text ?? (this.frames.length ? Player.written(this.frames.at(-1)) : "");
  }

  #wire() {
    const press = (name, act) => this.find(name).addEventListener("click", act);
    press(".edit", () => this.hand.take([0]) || this.does.begin(this.generation.text));
    press(".copy", () => copyText(this.written, this.find(".copy")));
    press(".keep-it", () => {
      this.find(".keep-it").setAttribute("aria-pressed", "true");
      this.find(".keep-it").textContent = "Kept";
      this.does.keep(this.generation);
    });
  }
}

// A control with the checker's verdict, as a symbol and a word.
export function checkedItem(control) {
  const item = controlItem(control);
  item.append(make("span", "verdict", verdict(control.satisfied).meaning));
  return item;
}

function waitingItem({ name, target }) {
  const item = make("li", "waiting");
  item.append(make("span", "mark", "·"), make("span", "name", name), make("span", "target", target));
  return item;
}
