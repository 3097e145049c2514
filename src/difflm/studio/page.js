"use strict";
// The page around the texts: time, play, theme, copy.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const texts = data.texts.map((text) => ({ ...text, frames: Player.unpack(text.frames, data.tokens) }));
  const longest = texts.reduce((most, text) => (text.frames.length > most.frames.length ? text : most), { frames: [] });
  const last = Math.max(0, longest.frames.length - 1);
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const WHOLE = 8000; // milliseconds from noise to text at speed 1
  const pace = Math.min(400, Math.max(40, WHOLE / (last + 1)));
  const slider = byId("time");
  let step = 0;
  let timer = null;

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // ---- texts ----

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

  function controlItem(control) {
    const [mark, meaning, kind] =
      control.satisfied === true ? ["✓", "satisfied", "met"]
      : control.satisfied === false ? ["✗", "not satisfied", "missed"]
      : ["–", "not checked", "open"];
    const item = make("li", kind);
    const sign = make("span", "mark", mark);
    sign.setAttribute("role", "img");
    sign.setAttribute("aria-label", meaning);
    item.append(sign, make("span", "name", control.name), make("span", "target", wordsOf(control.target)));
    const notes = [meaning];
    if (typeof control.score === "number") notes.push(`score ${Number(control.score.toFixed(3))}`);
    if (control.checker) notes.push(`checked by ${control.checker}`);
    item.title = notes.join(", ");
    return item;
  }

  function wordsOf(target) {
    if (target === null || target === undefined || target === true) return "";
    if (Array.isArray(target)) return target.map(wordsOf).join(" ");
    if (typeof target !== "object") return String(target);
    return Object.entries(target).map(([name, value]) => `${name}=${wordsOf(value)}`).join(" ");
  }

  async function copyText(text, button) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      copyBySelection(text);
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }

  // Where the clipboard is closed to pages from a file.
  function copyBySelection(text) {
    const area = make("textarea", "aside");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

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
    show(step);
  }

  // ---- time ----

  function show(wanted, animate = false) {
    step = Math.min(last, Math.max(0, wanted));
    for (const { text, card, words, sureness } of cards) {
      Player.draw(words, text, step, animate && !calm.matches);
      const frame = Player.at(text, step);
      const share = frame ? Player.sureness(frame) : 1;
      sureness.textContent = `${Math.floor(share * 100)} % sure`;
      card.style.setProperty("--sure", share.toFixed(3));
    }
    const frame = Player.at(longest, step);
    const t = frame ? frame.t.toFixed(3) : "–";
    // By the frame's own step: of a long run not every step is kept.
    const number = frame ? frame.step + 1 : 0;
    const total = longest.frames.length ? longest.frames[last].step + 1 : 0;
    byId("step").textContent = `${number}/${total}`;
    byId("t").textContent = t;
    slider.value = step;
    slider.setAttribute("aria-valuetext", `step ${number} of ${total}, t ${t}`);
    document.documentElement.style.setProperty("--at", last ? step / last : 1);
  }

  function playing() {
    return timer !== null;
  }

  function advance() {
    show(step + 1, true);
    if (step >= last) pause();
    else timer = setTimeout(advance, pace / Number(byId("speed").value));
  }

  function play() {
    if (step >= last) show(0);
    timer = setTimeout(advance, pace / Number(byId("speed").value));
    told();
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    told();
  }

  function told() {
    const button = byId("play");
    button.setAttribute("aria-label", playing() ? "Pause" : "Play");
    button.title = playing() ? "Pause (space)" : "Play (space)";
    button.classList.toggle("playing", playing());
    byId("where").setAttribute("aria-live", playing() ? "off" : "polite"); // no fifty announcements
  }

  function toggle() {
    playing() ? pause() : play();
  }

  function go(wanted) {
    if (playing()) pause();
    show(wanted, Math.abs(wanted - step) === 1);
  }

  const KEYS = {
    ArrowLeft: () => go(step - 1),
    ArrowRight: () => go(step + 1),
    Home: () => go(0),
    End: () => go(last),
    " ": toggle,
  };

  document.addEventListener("keydown", (event) => {
    const own = event.target.closest("select") || (event.key === " " && event.target.closest("button"));
    if (own || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  byId("play").addEventListener("click", toggle);
  slider.addEventListener("input", () => go(Number(slider.value)));
  slider.max = last;

  // ---- the curve above the slider: how sure all texts are, step by step ----

  function curve() {
    const points = [];
    for (let i = 0; i <= last; i++) {
      const frames = texts.map((text) => Player.at(text, i)).filter(Boolean);
      const mean = frames.reduce((sum, frame) => sum + Player.sureness(frame), 0) / Math.max(1, frames.length);
      points.push(`L${last ? (100 * i) / last : 100} ${(100 * (1 - mean)).toFixed(2)}`);
    }
    return `M0 100${points.join("")}L100 100Z`;
  }
  for (const id of ["curve", "played"]) byId(id).setAttribute("d", curve());

  // ---- theme ----

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
  }
  byId("theme").addEventListener("click", () => {
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  theme(dark.matches ? "dark" : "light");

  // ---- where it all comes from ----

  const { model, command, ...others } = data.about;
  const seeds = [...new Set(texts.map((text) => text.seed))];
  const count = `${texts.length} ${texts.length === 1 ? "text" : "texts"}`;
  byId("title").textContent = model ?? "difflm";
  byId("about").textContent = `${count} out of noise`;
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

  told();
  reserve();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) reserve();
    width = innerWidth;
  });
  if (calm.matches) show(last);
  else play();
})();
