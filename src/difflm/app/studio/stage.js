// The texts of one request, side by side: live while they form, and by the timeline afterwards.
import { Card } from "./card.js";
import { byId, calm } from "./parts.js";
import { Player } from "./player.js";
import { Time } from "./time.js";

const WHOLE = 3000; // milliseconds that the forming of a text takes at least, so that it can be seen

export class Stage {
  cards = [];
  #timer = null;
  #following = true; // the drafts as they come; until somebody takes the time in hand
  #caughtUp = () => {};
  #newFrames = false; // since the last look

  constructor(does) {
    this.does = { ...does, time: () => this.time.at, end: () => this.#end(), onlyOne: (card) => this.#onlyOne(card) };
    this.time = new Time((i, animate) => this.#replay(i, animate));
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== width) for (const card of this.cards) card.freeRoom();
      width = innerWidth;
    });
  }

  open(request, steps, candidates = request.candidates ?? 1) {
    clearTimeout(this.#timer);
    if (this.time.playing) this.time.pause();
    const n = request.n ?? 1;
    Object.assign(this, { steps, each: candidates, done: false });
    this.#following = true;
    const card = (_, i) => new Card(i, n === 1, listed(request), this.each, request.edit, this.does);
    this.cards = Array.from({ length: n }, card);
    byId("texts").dataset.columns = n === 1 ? 1 : n >= 5 ? 3 : 2;
    byId("texts").replaceChildren(...this.cards.map((card) => card.element));
    byId("texts").classList.add("forming", "live");
    this.time.load([], steps);
    this.time.point(0);
    this.time.live = true;
    this.#tick();
  }

  frames(list) {
    this.#newFrames = true;
    for (const { sample, ...frame } of list) {
      this.cards[Math.floor(sample / this.each)]?.add(sample % this.each, frame);
    }
  }

  // A faster model's text.
  preview(sample, text, label) {
    this.cards[sample]?.showPreview(text, label);
  }

  text({ sample, ...generation }) {
    this.cards[sample]?.finish(generation);
  }

  // Nothing more comes. Resolves once everything that came has been shown.
  async close() {
    this.done = true;
    await new Promise((resolve) => {
      this.#caughtUp = resolve;
    });
    if (this.#following) this.time.live = false;
    byId("texts").classList.remove("live");
    byId("texts").classList.toggle("forming", this.time.playing);
    for (const card of this.cards) {
      card.stop();
      if (card.settled) card.freeRoom(); // once, when its marks and buttons appear anyway
    }
  }

  #tick() {
    let more = !this.done;
    for (const card of this.cards) {
      if (!this.#following) card.skip(this.time.at);
      else if (!calm.matches) more = card.advance() || more;
      else if (card.generation || this.done) card.skip(); // nothing moves: the text, once it is there
    }
    if (this.#newFrames || this.done) this.#moments();
    this.#newFrames = false;
    if (this.#following) this.time.point(this.#newest());
    if (more) this.#timer = setTimeout(() => this.#tick(), Math.min(120, Math.max(16, WHOLE / this.steps)));
    else this.#caughtUp();
  }

  #newest() {
    const forming = this.cards.filter((card) => card.head >= 0 && !card.settled);
    return Math.max(0, ...(forming.length ? forming : this.cards).map((card) => card.head));
  }

  #moments() {
    const longest = this.cards.reduce((most, card) => (card.last > most.last ? card : most));
    const moments = longest.frames.map((frame, i) => {
      const now = this.cards.map((card) => Player.at(card.text, i)).filter(Boolean);
      return { step: frame.step, t: frame.t, sure: now.reduce((sum, one) => sum + one.sure, 0) / now.length };
    });
    this.time.load(moments, this.done ? moments.length : Math.max(this.steps, moments.length));
  }

  #replay(i, animate) {
    this.#following = false;
    byId("texts").classList.toggle("forming", this.time.playing && i < this.time.last);
    for (const card of this.cards) {
      card.hand.leave();
      card.likely.hide();
      card.draw(i, animate);
    }
  }

  // To the finished texts.
  #end() {
    if (this.time.at < this.time.last) this.time.go(this.time.last);
  }

  #onlyOne(card) {
    for (const other of this.cards) if (other !== card) other.hand.leave();
  }

  get generations() {
    return this.cards.flatMap((card) => (card.generation ? [card.generation] : []));
  }
}

// The controls of a request, as their marks name them.
function listed(request) {
  const pairs = (key) =>
    Object.entries(request[key] ?? {}).map(([name, value]) => ({ name: key, target: `${name}=${value}` }));
  const single = (key) => (key in request ? [{ name: key, target: String(request[key]) }] : []);
  const many = (key) => (request[key] ?? []).map((target) => ({ name: key, target }));
  return [
    ...single("infill"), ...single("length"), ...pairs("field"), ...pairs("label"),
    ...single("pos"), ...single("tree"), ...many("span"), ...many("contains"), ...many("avoid"),
  ];
}
