// The studio: sends requests to the server and shows the texts as they form.
import { get, stream, useModel } from "./api.js";
import { offerExamples, welcome } from "./examples.js";
import { Export } from "./export.js";
import { clearFields, showAtField } from "./faults.js";
import { Kept } from "./kept.js";
import { Panel } from "./panel.js";
import { byId, themed, warn } from "./parts.js";
import { preview } from "./preview.js";
import { Race } from "./race.js";
import { fromHash, toHash } from "./request.js";
import { Stage } from "./stage.js";

const wide = matchMedia("(min-width: 60rem)"); // as in studio.css: the panel stands beside the texts
let panel, stage, kept, model;
let faster; // a model that `model` taught to write in fewer steps, if it is served, too
let several = false; // models are served
let asked = {}; // the latest request
let made = null; // the one whose texts are on the stage
let running = null; // an AbortController while the server writes

// ---- sending requests ----

async function write(request) {
  running?.abort();
  asked = request;
  const own = (running = new AbortController());
  fault(null);
  busy(true);
  const begun = performance.now();
  const writing = `Writing ${counted(request.n ?? 1, "text")} …`;
  tell(writing);
  try {
    const wait = (seconds) => tell(`The server is busy; trying again in ${seconds} s.`);
    for await (const [name, data] of stream(request, own.signal, wait)) {
      own.signal.throwIfAborted();
      if (made !== request) clear(request, data.candidates); // what was on the stage stays until the server has taken this one
      if (name === "queued") {
        warn(byId("warning"), data.warnings);
        tell(data.ahead ? `${counted(data.ahead, "request")} ahead …` : writing);
        if (!data.ahead) preview(request, model, faster, own.signal, (...draft) => stage.preview(...draft));
      }
      else if (name === "frame") stage.frames(data.frames);
      else if (name === "text") {
        if (data.warnings) warn(byId("warning"), data.warnings);
        stage.text(data);
      }
    }
    await stage.close();
    if (running === own) finished((performance.now() - begun) / 1000);
  } catch (problem) {
    if (running !== own) return; // another request took its place
    if (made === request) await stage.close();
    if (own.signal.aborted) tell("Stopped.");
    else fault(problem);
  } finally {
    own.abort(); // its drafts, if some are still to come
    if (running === own) {
      running = null;
      busy(false);
    }
  }
}

function clear(request, candidates) {
  made = request;
  panel.tally([]);
  stage.open(request, request.steps ?? model.steps, candidates);
}

function finished(seconds) {
  const texts = stage.generations;
  const checks = texts.flatMap((text) => text.controls).filter((control) => control.satisfied !== null);
  const obeyed = checks.filter((control) => control.satisfied).length;
  const marks = checks.length ? ` ${obeyed} of ${counted(checks.length, "constraint")} met.` : "";
  const source = made.edit ? ` New words are highlighted.${texts.length === 1 ? changes(texts[0]) : ""}` : "";
  tell(`${counted(texts.length, "text")} in ${seconds.toFixed(1)} s.${marks}${source}`);
  panel.tally(texts);
  if (texts.length) panel.suggest(texts[0].text);
}

function changes({ changed = [] }) {
  return changed.length ? ` Changed: ${changed.map(([old, now]) => `${old || "–"} → ${now || "–"}`).join(", ")}.` : "";
}

function counted(count, thing) {
  return `${count} ${thing}${count === 1 ? "" : "s"}`;
}

function submit(request) {
  const hash = toHash(request, several ? model.name : "");
  if (hash !== location.hash) history.pushState(null, "", hash);
  if (!wide.matches) {
    byId("panel").open = false; // or the texts would form out of sight
    byId("stage").scrollIntoView({ block: "nearest" });
  }
  write(request);
}

// A request based on a text on the stage.
function follow(changes) {
  const request = { ...panel.read(), ...changes };
  for (const [key, value] of Object.entries(changes)) if (value === undefined) delete request[key];
  panel.write(request);
  submit(panel.read());
}

function stop() {
  running?.abort();
}

// ---- status and errors ----

function tell(text) {
  byId("status").textContent = text;
}

function fault(problem) {
  const notice = byId("notice");
  clearFields();
  notice.hidden = true;
  if (problem === null) return;
  if (problem.status === 422 && showAtField(problem.message)) {
    tell("Nothing was written: see the marked field.");
    return;
  }
  notice.hidden = false;
  notice.querySelector("p").textContent = problem.message;
  tell("");
}

function busy(yes) {
  byId("write").hidden = yes;
  byId("stop").hidden = !yes;
  byId("export").disabled = yes || made === null;
  document.body.classList.toggle("busy", yes);
}

// ---- what can be done with a text ----

const SETTLED = { length: undefined, pos: undefined, tree: undefined }; // by the words of a text that is worked on

const does = (controls) => ({
  offers: { ...controls, sizes: Boolean(controls.infill?.sizes) && model.whole_words },
  begin: (text) => {
    panel.write({ ...panel.read(), infill: undefined, edit: text });
    byId("start").focus();
  },
  fill: (template) => follow({ ...SETTLED, infill: template, edit: undefined, keep: undefined, strength: undefined }),
  rewrite: (text, words) => {
    const before = (made.keep ?? []).filter((phrase) => text.includes(phrase) && phrase !== words);
    follow({ ...SETTLED, edit: text, keep: words ? [...before, words] : before, infill: undefined });
  },
  must: (phrases) => follow({ contains: [...new Set([...(panel.read().contains ?? []), ...phrases])] }),
  avoid: (words) => follow({ avoid: [...new Set([...(panel.read().avoid ?? []), ...words])] }),
  keep: (generation) => kept.add(generation, made),
});

// ---- start-up ----

function usual() {
  return wide.matches ? 4 : 2; // texts at once
}

function wire() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (panel) submit(panel.read()); // or the server has not said yet what can be asked
  });
  byId("next").addEventListener("click", () => panel && follow({ seed: (panel.read().seed ?? 0) + 1 }));
  byId("stop").addEventListener("click", stop);
  byId("again").addEventListener("click", () => (model ? write(asked) : begin()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    if (event.key === "Escape" && running && !event.target.closest("dialog")) stop();
  });
  addEventListener("popstate", () => panel && (named() === model.name || !several ? open() : location.reload()));
  byId("model-choice").addEventListener("change", (event) => {
    location.hash = `model=${encodeURIComponent(event.target.value)}`;
    location.reload();
  });
  const unfold = () => { byId("panel").open = wide.matches; };
  wide.addEventListener("change", unfold);
  unfold();
  themed(byId("theme"));
}

// The model that the address names, of those that are served.
function named() {
  return new URLSearchParams(location.hash.slice(1)).get("model");
}

function introduce(models) {
  several = models.length > 1;
  byId("chooser").hidden = !several;
  byId("model-choice").replaceChildren(...models.map(({ name }) => new Option(name, name, false, name === model.name)));
  const size = `${(model.parameters / 1e6).toFixed(1)}M parameters`;
  byId("model").textContent = [several ? "" : model.name, model.method, size].filter(Boolean).join(" · ");
  document.title = `${model.name} – difflm studio`;
  const way = model.left_to_right
    ? "A left-to-right language model writes one word at a time."
    : "A diffusion language model writes all words at once, out of noise.";
  const units = model.whole_words ? "words" : "tokens";
  const learned = model.learned ? `was trained on ${model.learned}, ` : "";
  const vocabulary = `${model.vocabulary.toLocaleString("en")} ${units}`;
  byId("intro").textContent = `${way} This one ${learned}knows ${vocabulary}, and writes up to ${model.longest}.`;
}

function open() {
  const given = fromHash(location.hash);
  const request = Object.keys(given).length ? given : welcome(model, panel.controls, usual());
  panel.write(request);
  if (panel.controls.source && !panel.read().source) {
    tell("Enter a source: this model writes every text from one.");
    byId("source").focus();
    return;
  }
  write(panel.read());
}

async function begin() {
  fault(null);
  try {
    const { models } = await get("api/models");
    model = models.find(({ name }) => name === named()) ?? models[0];
    faster = models.find(({ name }) => name === model.preview);
    introduce(models);
    if (several) useModel(model.name);
    const controls = await get("api/controls");
    panel = new Panel(model, controls, () => {});
    stage = new Stage(does(controls));
    const put = (request) => {
      panel.write(request);
      submit(panel.read());
    };
    kept = new Kept(put);
    offerExamples(model, controls, usual(), put);
    new Export(several, model.name, () => ({ request: made, stage, texts: stage.generations, kept: kept.items }));
    new Race(models, () => panel.read());
    open();
  } catch (problem) {
    fault(problem);
  }
}

wire();
begin();
