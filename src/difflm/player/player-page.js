import { Player } from "./player.js";
import { byId, controlItem, copyText, calm, make, themed, warn } from "./parts.js";
import { Time } from "./time.js";

// The self-contained player: the texts that its file holds.
(() => {
  const data = JSON.parse(byId("data").textContent);
  const texts = data.texts.map((text) => ({ ...text, frames: Player.unpack(text.frames, data.tokens) }));
  const longest = texts.reduce((most, text) => (text.frames.length > most.frames.length ? text : most), { frames: [] });
  const time = new Time(show);

  const cards = texts.map((text, number) => {
    const card = byId("card").content.firstElementChild.cloneNode(true);
    card.querySelector("h2").textContent = texts.length > 1 ? `text ${number + 1}` : "text";
    const copy = card.querySelector(".copy");
    copy.setAttribute("aria-label", `Copy text ${number + 1}`);
    copy.addEventListener("click", () => copyText(text.text, copy));
    card.querySelector(".controls").append(...text.controls.map(controlItem));
    if (!text.controls.length) card.querySelector(".controls").remove();
    byId("texts").append(card);
    return { text, card, words: card.querySelector(".text"), sureness: card.querySelector(".sureness") };
  });
  byId("texts").dataset.columns = cards.length === 1 ? 1 : cards.length >= 5 ? 3 : 2;

  // Room for a text's longest draft, so that nothing below it jumps while it plays.
  function reserve() {
    for (const { text, words } of cards) {
      const length = (i) => Player.written(text.frames[i]).length;
      const order = text.frames.map((_, i) => i).sort((a, b) => length(b) - length(a));
      words.style.minHeight = "";
      let most = 0;
      for (const i of [text.frames.length - 1, ...order.slice(0, 3)]) {
        Player.draw(words, text, i);
        most = Math.max(most, words.offsetHeight);
      }
      words.style.minHeight = `${most}px`;
    }
    time.draw(time.at);
  }

  function show(step, animate) {
    for (const { text, card, words, sureness } of cards) {
      Player.draw(words, text, step, animate);
      // Of a finished text it would vouch for what is written, of which it knows nothing.
      const share = step < text.frames.length - 1 ? Player.sureness(Player.at(text, step)) : 0;
      sureness.textContent = share ? `${Math.floor(share * 100)} % sure` : "";
      card.classList.toggle("early", step < text.frames.length - 1); // the marks are of the finished text
      card.style.setProperty("--sure", share.toFixed(3));
    }
  }

  function moment(frame, i) {
    const frames = texts.map((text) => Player.at(text, i)).filter(Boolean);
    const sure = frames.reduce((sum, one) => sum + Player.sureness(one), 0) / Math.max(1, frames.length);
    return { step: frame.step, t: frame.t, sure };
  }

  // ---- where it all comes from ----

  warn(byId("warning"), [...new Set(texts.flatMap((text) => text.warnings))]);
  const { model, command, ...others } = data.about;
  const seeds = [...new Set(texts.map((text) => text.seed))];
  const count = `${texts.length} ${texts.length === 1 ? "text" : "texts"}`;
  const atOnce = texts.some((text) => text.frames[0]?.tokens.length > 2);
  byId("about").textContent = [model, count].filter(Boolean).join(" · ");
  byId("intro").textContent = atOnce
    ? "These texts were written by diffusion: all words form at once out of noise, and become more certain at every step."
    : "These texts were written from left to right, one word at every step.";
  const facts = [["seed", seeds.join(", ")], ...Object.entries(others), ["command", command]];
  for (const [name, value] of facts) {
    if (value === undefined || value === null || value === "") continue;
    const row = make("div");
    const answer = make("dd");
    answer.append(name === "command" ? make("code", "", String(value)) : String(value));
    row.append(make("dt", "", name), answer);
    byId("facts").append(row);
  }

  // ---- begin ----

  themed(byId("theme"));
  time.load(longest.frames.map(moment));
  reserve();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) reserve();
    width = innerWidth;
  });
  if (calm.matches) time.draw(time.last);
  else time.play();
})();
