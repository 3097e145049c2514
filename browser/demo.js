// The page: asks the worker for a text, shows it while it forms, and plays it again.
import { byId, calm, copyText, themed, warn } from "./parts.js";
import { Player } from "./player.js";
import { Time } from "./time.js";

const WHOLE = 3000; // milliseconds that the forming of a text takes at least, so that it can be seen
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const time = new Time((i, animate) => {
  following = false;
  draw(i, animate);
});
let number = 0; // of the request, of which the worker answers the newest
let text = { frames: [] };
let following = true; // the drafts as they come; until somebody takes the time in hand
let unit = "words", example = "";

const say = (sentence) => { byId("status").textContent = sentence; };

// ---- what the worker says ----

worker.addEventListener("error", (event) => fail(event.message || "The page's own script cannot be loaded."));
worker.addEventListener("message", ({ data }) => {
  if (data.loaded !== undefined) load(data.loaded);
  else if (data.facts) introduce(data.facts);
  else if (data.failed) fail(data.failed);
  else if (data.number === number) data.refused ? refuse(data.refused) : add(data);
});

function load(share) {
  byId("loading").value = share;
  say(`Loading the model: ${Math.floor(100 * share)} %`);
}

function introduce(facts) {
  unit = facts.unit;
  example = facts.example;
  document.title = `${facts.name}: a text out of noise`;
  byId("about").textContent = `${facts.name} · ${facts.method} · ${(facts.parameters / 1e6).toFixed(1)}M parameters`;
  const from = facts.learned ? ` from ${facts.learned}` : "";
  byId("intro").textContent = "A diffusion language model writes all words at once, out of noise: this one knows "
    + `${facts.pieces.toLocaleString("en")} ${unit}${from} and runs in your browser.`;
  byId("unit").textContent = unit;
  byId("length").max = facts.longest;
  byId("steps").value = facts.steps;
  byId("example").hidden = !example;
  byId("loading").hidden = true;
  for (const id of ["write", "next"]) byId(id).disabled = false;
  say("Ready: press Write");
}

function fail(why) {
  byId("loading").hidden = true;
  say("The model cannot be run here.");
  warn(byId("warning"), [why]);
}

function refuse(why) {
  end(why.startsWith("The model") ? "Stopped" : "Not written");
  warn(byId("warning"), [why]);
}

function add({ frame, text: written, unknown = [], seconds, steps }) {
  text.frames.push(frame);
  const sure = (one) => ({ step: one.step, t: one.t, sure: Player.sureness(one) });
  time.load(text.frames.map(sure), written === undefined ? steps : text.frames.length);
  if (written !== undefined) {
    text.text = written;
    end(`${frame.tokens.length} ${unit} in ${seconds.toFixed(1)} s, ${text.frames.length} steps`);
    byId("copy").hidden = byId("open").hidden = false;
    const names = unknown.map((word) => `“${word}”`).join(", ");
    if (names) warn(byId("warning"), [`The model does not know ${names}, and cannot take that into account.`]);
  } else say(`Step ${frame.step + 1} of ${steps}`);
  if (!following) return;
  time.point(text.frames.length - 1);
  if (written !== undefined || !calm.matches) draw(text.frames.length - 1, !calm.matches);
}

// ---- what is shown ----

function draw(i, animate) {
  const place = byId("text"), ended = text.text !== undefined && i >= text.frames.length - 1;
  Player.draw(place, text, i, animate);
  place.style.minHeight = `${Math.max(Number.parseFloat(place.style.minHeight) || 0, place.offsetHeight)}px`;
  const share = text.frames.length && !ended ? Player.sureness(Player.at(text, i)) : 0;
  byId("sureness").textContent = share ? `${Math.floor(100 * share)} % sure` : "";
  byId("card").style.setProperty("--sure", share.toFixed(3));
}

function forming(yes) {
  byId("write").hidden = yes;
  byId("stop").hidden = !yes;
  byId("next").disabled = yes;
}

function end(sentence) {
  if (following) time.live = false;
  forming(false);
  say(sentence);
}

// ---- what the visitor does ----

const value = (id) => (byId(id).value === "" ? null : Number(byId(id).value));

function write() {
  if (!byId("ask").reportValidity()) return;
  if (time.playing) time.pause();
  number += 1;
  text = { frames: [] };
  following = true;
  warn(byId("warning"));
  byId("copy").hidden = byId("open").hidden = true;
  byId("text").replaceChildren();
  byId("text").style.minHeight = "";
  const steps = value("steps"), pace = calm.matches ? 0 : WHOLE / steps;
  time.load([], steps);
  time.point(0);
  time.live = true;
  forming(true);
  say(`Step 0 of ${steps}`);
  byId("card").scrollIntoView({ block: "nearest", behavior: calm.matches ? "instant" : "smooth" });
  const request = { template: byId("template").value, length: value("length"), seed: value("seed"), steps };
  worker.postMessage({ number, request, pace });
}

function stop() {
  number += 1;
  worker.postMessage({ number });
  end("Stopped");
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("write").disabled && byId("stop").hidden) write();
});
byId("stop").addEventListener("click", stop);
byId("next").addEventListener("click", () => {
  byId("seed").value = (value("seed") + 1) % 2 ** 31;
  write();
});
byId("template").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("gap").addEventListener("click", () => {
  const { selectionStart: from, selectionEnd: to, value: now } = byId("template");
  const [before, after] = [now.slice(0, from).trimEnd(), now.slice(to).trimStart()];
  const closes = /^[.,;:!?]/.test(after);
  byId("template").value = `${before}${before && " "}___${after && !closes ? " " : ""}${after}`;
  byId("template").focus();
});
byId("example").addEventListener("click", () => ask(example));
byId("open").addEventListener("click", () => {
  const words = text.text.split(" "), third = Math.max(1, Math.floor(words.length / 3));
  ask([...words.slice(0, third), "___", ...words.slice(-third)].join(" "));
});
byId("copy").addEventListener("click", () => copyText(text.text, byId("copy")));

function ask(template) {
  byId("template").value = template;
  byId("length").value = "";
  byId("template").focus();
}

themed(byId("theme"));
load(0);
time.load([]);
time.point(0);
