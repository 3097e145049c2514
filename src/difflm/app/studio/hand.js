// Selected words of a finished text, to edit them or have the model rewrite them.
export class Hand {
  #places = null; // of the words, in order; null: the hand is empty
  #anchor = 0; // where an extended selection began
  #cursor = 0;

  constructor(card) {
    this.card = card;
    const { words, does } = card;
    words.addEventListener("click", (event) => this.#pressed(event));
    words.addEventListener("pointerup", () => setTimeout(() => this.#selected()));
    words.addEventListener("keydown", (event) => this.#key(event));
    card.find(".editor").addEventListener("submit", (event) => {
      event.preventDefault();
      const words = card.find(".instead").value.trim();
      does.rewrite(this.#with(() => words).trim().replace(/ {2,}/g, " "), words);
    });
    const press = (name, act) => card.find(name).addEventListener("click", act);
    press(".to-gap", () => does.fill(this.#with(() => "___")));
    press(".to-sized", () => does.fill(this.#with((count) => `___:${count}`)));
    press(".to-must", () => does.must(this.#phrases()));
    press(".to-avoid", () => does.avoid(this.#words()));
    press(".leave", () => this.leave(true));
    card.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.#places) return;
      event.stopPropagation();
      this.leave(true);
    });
  }

  get #spans() {
    return [...this.card.words.querySelectorAll(".word")];
  }

  // ---- taking ----

  #pressed(event) {
    const word = event.target.closest(".word");
    if (!word || !this.card.generation || !getSelection().isCollapsed) return;
    const place = this.#spans.indexOf(word);
    if (event.shiftKey && this.#places) this.take(range(this.#anchor, place), place, false);
    else if ((event.ctrlKey || event.metaKey) && this.#places) this.take(toggled(this.#places, place), place);
    else this.take([place]);
  }

  // Words that were marked with the pointer, as any text is.
  #selected() {
    const selection = getSelection();
    if (selection.isCollapsed || !this.card.generation || !selection.containsNode(this.card.words, true)) return;
    const touched = this.#spans.flatMap((span, i) => (selection.containsNode(span, true) ? [i] : []));
    if (!touched.length) return;
    selection.removeAllRanges();
    this.take(touched);
  }

  #key(event) {
    if (!this.#places) return;
    const most = this.#spans.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -most, End: most };
    if (event.key in moves) {
      const to = Math.min(most, Math.max(0, this.#cursor + moves[event.key]));
      event.shiftKey ? this.take(range(this.#anchor, to), to, false) : this.take([to]);
    } else if (event.key === "Enter" || event.key === " ") {
      this.card.find(".instead").select();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Outline words and show what can be done with them. Returns false if there are none.
  take(places, cursor = places.at(-1), anchored = true) {
    const { card } = this;
    card.does.end();
    if (card.generation === null || card.shown !== card.chosen) return false;
    card.draw(card.last);
    if (!this.#spans.length) return false;
    card.does.onlyOne(card);
    card.likely.hide();
    this.#places = [...new Set(places.flatMap((place) => this.#word(place)))].sort((a, b) => a - b);
    this.#cursor = cursor;
    if (anchored) this.#anchor = cursor;
    card.words.setAttribute("role", "group");
    const keys = "arrow keys move, Shift extends the selection, Enter edits";
    card.words.setAttribute("aria-label", `Words of ${card.title}: ${keys}`);
    this.#spans.forEach((span, i) => {
      span.classList.toggle("picked", this.#places.includes(i));
      span.setAttribute("role", "button");
      span.setAttribute("aria-pressed", String(this.#places.includes(i)));
      span.tabIndex = i === cursor ? 0 : -1;
    });
    this.#spans[cursor]?.focus({ preventScroll: true });
    this.#offer();
    return true;
  }

  #offer() {
    const { card } = this;
    const { offers } = card.does;
    const sizes = runs(this.#places).map(([first, last]) => last - first + 1);
    card.find(".editor").hidden = sizes.length === 0;
    card.find(".instead").value = this.#phrases().join(" … ");
    card.find(".to-sized").textContent = `Gap ___:${sizes[0]}`;
    card.find(".to-sized").hidden = sizes.some((size) => size !== sizes[0]) || !offers.sizes;
    card.find(".change").hidden = card.find(".instead").hidden = sizes.length !== 1 || !offers.edit || offers.edit.noise;
    const alone = this.#places.length === 1 && !card.find(".change").hidden ? this.#places[0] : undefined;
    card.likely.offer(alone, card.find(".likely-words"), card.find(".instead"));
    card.find(".to-gap").hidden = !offers.infill;
    card.find(".to-must").hidden = !offers.contains;
    card.find(".to-avoid").hidden = !offers.avoid;
  }

  leave(focus = false) {
    if (!this.#places) return;
    this.#places = null;
    this.card.find(".editor").hidden = true;
    for (const name of ["role", "aria-label"]) this.card.words.removeAttribute(name);
    for (const span of this.#spans) {
      span.classList.remove("picked");
      for (const name of ["role", "tabindex", "aria-pressed"]) span.removeAttribute(name);
    }
    if (focus) this.card.find(".edit").focus();
  }

  // All places of the word at this one: a word may be written in pieces, of which the first brings its space along.
  #word(place) {
    const { tokens, spaces } = this.card.frames[this.card.last];
    if (spaces.some(Boolean)) return [place];
    let [first, last] = [place, place];
    while (first > 0 && !tokens[first].startsWith(" ")) first -= 1;
    while (last + 1 < tokens.length && !tokens[last + 1].startsWith(" ")) last += 1;
    return range(first, last);
  }

  // ---- what they say ----

  #phrases() {
    const { tokens, spaces } = this.card.frames[this.card.last];
    const written = (i, first) => (i > first && spaces[i] ? " " : "") + tokens[i];
    return runs(this.#places).map(([first, last]) => range(first, last).map((i) => written(i, first)).join("").trim());
  }

  // One by one, without punctuation; pieces of words as the words that they make up.
  #words() {
    const { tokens, spaces } = this.card.frames[this.card.last];
    const whole = spaces.some(Boolean);
    const words = whole ? this.#places.map((i) => tokens[i]) : this.#phrases().flatMap((phrase) => phrase.split(" "));
    return words.filter((word) => /[\p{L}\p{N}]/u.test(word));
  }

  // The text with something else in place of each run of words in hand.
  #with(instead) {
    const { tokens, spaces } = this.card.frames[this.card.last];
    const begins = new Map(runs(this.#places).map(([first, last]) => [first, last - first + 1]));
    const apart = (i) => (spaces[i] || tokens[i].startsWith(" ") ? " " : "");
    return tokens.map((token, i) => {
      if (begins.has(i)) return apart(i) + instead(begins.get(i));
      return this.#places.includes(i) ? "" : (spaces[i] ? " " : "") + token;
    }).join("");
  }
}

function range(a, b) {
  return Array.from({ length: Math.abs(a - b) + 1 }, (_, i) => Math.min(a, b) + i);
}

function toggled(places, place) {
  return places.includes(place) ? places.filter((p) => p !== place) : [...places, place];
}

// Places as runs [first, last].
function runs(places) {
  const found = [];
  for (const place of places) {
    if (found.length && found.at(-1)[1] === place - 1) found.at(-1)[1] = place;
    else found.push([place, place]);
  }
  return found;
}
