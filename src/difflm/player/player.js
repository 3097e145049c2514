// Draws one text at one step. Shared by the player and by every page that shows forming texts.
//
// A text is {text, frames}; a frame is {step, t, tokens, confidence, changed} and, where it is known, `spaces`:
// whether a space is written before each token. A model that edits says in `edits` what the next step does with each.
// Of a model that denoises pixels it has their `picture`.
export const Player = (() => {
  const SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const LEVELS = 8;
  const EDITS = { k: "keep", r: "replace", d: "delete", i: "insert" };
  const RIGHT_TO_LEFT =
    /^[^\p{L}]*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
  const CONDENSE = [{ opacity: 0.15, filter: "blur(3px)" }, { opacity: 1, filter: "blur(0)" }];

  // The frames of a packed text (see frames.py): each holds only what differs from the one before.
  function unpack(frames, tokens) {
    const cells = [];
    return frames.map((packed) => {
      cells.length = packed.n;
      for (let i = 0; i < packed.w.length; i += 2) cells[packed.w[i]] = packed.w[i + 1];
      const changed = new Array(packed.n).fill(false);
      for (const place of packed.x) changed[place] = true;
      return {
        step: packed.s,
        t: packed.t,
        tokens: cells.map((cell) => tokens[cell >> 1]),
        spaces: cells.map((cell) => (cell & 1) === 1),
        confidence: Array.from(packed.c, (sign) => SIGNS.indexOf(sign) / (SIGNS.length - 1)),
        changed,
        edits: packed.e && Array.from(packed.e, (sign) => EDITS[sign]),
        picture: packed.p,
      };
    });
  }

  function at(text, step) {
    return text.frames[Math.min(step, text.frames.length - 1)];
  }

  function spaceBefore(frame, i) {
    return (frame.spaces ? frame.spaces[i] : i > 0 && frame.tokens[i] !== "") ? " " : "";
  }

  function written(frame) {
    return frame.tokens.map((token, i) => spaceBefore(frame, i) + token).join("");
  }

  // A finished text's last frame without the words behind its end, where a model writes some.
  function upToTheEnd(frame, text) {
    for (let end = frame.tokens.length; end > 0; end--) {
      const cut = { ...frame };
      for (const key of ["tokens", "spaces", "confidence", "changed", "edits"]) cut[key] = frame[key]?.slice(0, end);
      if (written(cut) === text) return cut;
    }
    return frame;
  }

  // How sure the text is of itself on the whole; words that show nothing do not count.
  function sureness(frame) {
    const shown = frame.confidence.filter((_, i) => frame.tokens[i] !== "");
    return shown.length ? shown.reduce((sum, c) => sum + c, 0) / shown.length : 0;
  }

  // One blank and one word for every token: kept from step to step, so that a word condenses in its place.
  function places(element, count) {
    if (element.childNodes.length !== 2 * count) {
      const nodes = [];
      for (let i = 0; i < count; i++) {
        const word = document.createElement("span");
        word.className = "word";
        nodes.push(document.createTextNode(""), word);
      }
      element.replaceChildren(...nodes);
    }
    return element.childNodes;
  }

  function drawWord(word, token, confidence, changed, edit, animate, forming) {
    if (word.textContent !== token) {
      word.textContent = token;
      if (animate) word.animate(CONDENSE, { duration: 260, easing: "ease-out" });
    }
    word.dataset.level = Math.min(LEVELS - 1, Math.floor(confidence * LEVELS));
    word.classList.toggle("changed", changed);
    word.dataset.edit = edit;
    word.title = forming ? `${Math.floor(confidence * 100)} % sure` : "";
  }

  function drawPlain(element, text) {
    element.replaceChildren(document.createTextNode(text));
  }

  // The pixels that the words of a frame are read off, above them.
  function drawPicture(element, url) {
    let picture = element.previousElementSibling;
    if (picture?.className !== "picture") {
      picture = document.createElement("img");
      Object.assign(picture, { className: "picture", alt: "the pixels of this text" });
      element.before(picture);
    }
    picture.src = url;
  }

  // Show `text` at `step` inside `element`. The end shows the finished text, even where its tokens spell another.
  function draw(element, text, step, animate = false) {
    element.dir = RIGHT_TO_LEFT.test(text.text ?? "") ? "rtl" : "ltr";
    const frame = at(text, step);
    if (frame?.picture) drawPicture(element, frame.picture);
    const ended = step >= text.frames.length - 1 && text.text !== undefined;
    if (!frame || (ended && written(frame) !== text.text)) {
      drawPlain(element, text.text ?? "");
      return;
    }
    const nodes = places(element, frame.tokens.length);
    frame.tokens.forEach((token, i) => {
      const visible = token.trimStart(); // byte pairs bring their spaces along
      nodes[2 * i].data = spaceBefore(frame, i) + token.slice(0, token.length - visible.length);
      // The first draft has none before it that it could differ from.
      const changed = !ended && step > 0 && frame.changed[i], edit = ended ? "keep" : frame.edits?.[i] ?? "keep";
      drawWord(nodes[2 * i + 1], visible, ended ? 1 : frame.confidence[i], changed, edit, animate, !ended);
    });
  }

  return { unpack, at, written, upToTheEnd, sureness, draw };
})();
