// Texts that were kept: they stay in this browser, and can be laid side by side.
import { checkedItem } from "./card.js";
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
    if (compared) {
      const state = make("span", "hint", i === this.base ? "the others are compared with this one" : "");
      if (i === this.base) foot.append(state);
      else press("Compare with this", () => this.#compareWith(i));
    }
    press("Open", () => this.onOpen(item.request));
    press("Copy", (button) => copyText(item.text, button));
    press("Forget", () => this.#set(this.items.filter((other) => other !== item)));
    card.append(text, marks, foot);
    card.classList.toggle("base", compared && i === this.base);
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
    return Array.isArray(items) ? items.filter((item) => typeof item?.text === "string" && Array.isArray(item.controls)) : [];
  } catch {
    return []; // storage is closed, or holds something else
  }
}

// The words of `text`, those marked that `base` does not have there (longest common subsequence).
function differing(base, text) {
  const [a, b] = [base, text].map((one) => one.split(" "));
  const best = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
  }
  const nodes = [];
  let i = 0;
  b.forEach((word, j) => {
    if (j) nodes.push(" ");
    while (i < a.length && a[i] !== word && best[i + 1][j] >= best[i][j + 1]) i += 1;
    const same = i < a.length && a[i] === word;
    nodes.push(same ? word : make("mark", "", word));
    if (same) i += 1;
  });
  return nodes;
}
