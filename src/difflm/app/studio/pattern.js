// The box for a regular expression: while the user types, the server says whether texts can match it, and how long.
import { judgePattern } from "./api.js";
import { byId } from "./parts.js";

const PAUSE = 250; // milliseconds without a key, after which it is asked

export class PatternBox {
  #others = []; // of several patterns, which a link may hold, the box shows the first
  #shown = "";
  #found = null;
  #waiting = null;
  #asking = null;

  read() {
    return [byId("pattern").value, ...this.#others];
  }

  write([first = "", ...others]) {
    byId("pattern").value = first;
    this.#others = others;
  }

  refresh(length) {
    const pattern = byId("pattern").value;
    if (pattern === this.#shown) {
      this.#say(length);
      return;
    }
    this.#shown = pattern;
    this.#found = null;
    this.#say(length);
    clearTimeout(this.#waiting);
    this.#asking?.abort();
    if (pattern) this.#waiting = setTimeout(() => this.#ask(pattern, length), PAUSE);
  }

  async #ask(pattern, length) {
    this.#asking = new AbortController();
    try {
      const found = await judgePattern(pattern, this.#asking.signal);
      if (pattern !== this.#shown) return;
      this.#found = found;
    } catch (fault) {
      if (fault.name === "AbortError" || pattern !== this.#shown) return;
      this.#found = { message: fault.message, lengths: [] };
    }
    this.#say(Number(byId("length").value) || length);
  }

  #say(length) {
    const place = byId("pattern-says");
    const { message, lengths = [], unit } = this.#found ?? {};
    const missed = length !== undefined && lengths.length > 0 && !lengths.includes(length);
    place.classList.toggle("wrong", Boolean(message) || missed);
    if (!this.#found) place.textContent = "";
    else if (message) place.textContent = sentence(message);
    else if (missed) place.textContent = `Texts that match have ${ranges(lengths)} ${unit}, not ${length}.`;
    else place.textContent = `Texts of ${ranges(lengths)} ${unit} match.`;
  }
}

// The server's message without the name of the field, since it is shown below that field.
function sentence(message) {
  const said = message.replace(/^pattern[,:] /i, "");
  return said[0].toUpperCase() + said.slice(1);
}

// 3, 4, 5, 9 as "3–5, 9"; of many stretches the first ones.
function ranges(lengths) {
  const found = [];
  for (const n of lengths) {
    const last = found.at(-1);
    if (last && last[1] + 1 === n) last[1] = n;
    else found.push([n, n]);
  }
  const told = found.slice(0, 4).map(([low, high]) => (low === high ? `${low}` : `${low}–${high}`));
  return told.join(", ") + (found.length > 4 ? ", …" : "");
}
