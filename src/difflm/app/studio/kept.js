// Kept texts: they are stored in this browser and can be compared.
import { checkedItem } from "./card.js";
import { lacking } from "./differ.js";
import { byId, copyText, make } from "./parts.js";

const STORE = "difflm-kept";
const MOST = 60;

export class Kept {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.items = stored();
    this.base = 0;
    byId("compare").addEventListener("change", () => this.#draw());
    byId("forget").addEventListener("click", () => this.#set([]));
    this.#draw();
  }

  add(generation, request) {
    const { text, tokens, controls, seed } = generation;
    if (this.items.some((item) => item.text === text)) return;
    this.#set([...this.items, { text, tokens, controls, seed, request }].slice(-MOST));
  }

  #set(items) {
    this.items = items;
    this.base = Math.min(this.base, Math.max(0, items.length - 1));
    try {
      localStorage.setItem(STORE, JSON.stringify(items));
    } catch {
      // then they stay until the page is closed
    }
    this.#draw();
  }

  #draw() {
    byId("kept").hidden = this.items.length === 0;
    byId("compare").disabled = this.items.length < 2;
    byId("kept-texts").replaceChildren(...this.items.map((item, i) => this.#card(item, i)));
  }

  #card(item, i) {
    const compared = byId("compare").checked && this.items.length > 1;
    const card = make("article", "card kept-card");
    const text = make("p", "text");
    if (compared && i !== this.base) text.append(...differing(this.items[this.base].text, item.text));
    else text.textContent = item.text;
    const marks = make("ul", "controls");
    marks.append(...item.controls.map(checkedItem));
    const foot = make("footer");
    const press = (label, act) => {
      const button = make("button", "quiet", label);
      button.type = "button";
      button.addEventListener("click", () => act(button));
      foot.append(button);
    };
    if (compared && i !== this.base) press("Compare with this", () => this.#compareWith(i));
    press("Open", () => this.onOpen(item.request));
    press("Copy", (button) => copyText(item.text, button));
    press("Delete", () => this.#set(this.items.filter((other) => other !== item)));
    card.append(text, marks, foot);
    if (compared && i === this.base) {
      card.classList.add("base");
      card.prepend(make("p", "hint", "The others are compared with this one."));
    }
    return card;
  }

  #compareWith(i) {
    this.base = i;
    this.#draw();
  }
}

function stored() {
  try {
    const items = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return items.filter((item) => typeof item.text === "string" && Array.isArray(item.controls));
  } catch {
    return []; // storage is closed, or holds something else
  }
}

// The words of `text`, with those marked that `base` does not have there.
function differing(base, text) {
  const words = text.split(" ");
  const fresh = lacking(base.split(" "), words);
  return words.flatMap((word, i) => [i ? " " : "", fresh[i] ? make("mark", "", word) : word]);
}
