// The request as the user sets it: the text to start from and the panel of controls.
import { PatternBox } from "./pattern.js";
import { byId, make } from "./parts.js";

const GAP = /(_{3,}|\[MASK\]|<mask>)(:\d+)?/gi;
const SLIDERS = ["n", "steps", "temperature", "guidance", "candidates", "strength"];
const GRAMMAR = ["pos", "tree", "span"];
const PHRASES = ["contains", "avoid", "keep"];

export class Panel {
  constructor(facts, controls, onInput) {
    Object.assign(this, { facts, controls });
    this.defaults = { n: 1, steps: facts.steps, guidance: 10, candidates: 1, strength: 0.5, seed: 0 };
    this.defaults.temperature = facts.temperature;
    for (const key of ["field", "label"]) byId(key).append(...this.#choices(key));
    byId("tags").append(...(controls.pos?.tags ?? []).map((tag) => this.#tag(tag)));
    byId("tree-labels").textContent = labels(controls.tree);
    byId("span-labels").textContent = labels(controls.span);
    byId("grammar").hidden = !controls.pos && !controls.tree && !controls.span;
    this.pattern = new PatternBox();
    this.#offer();
    this.#limit(controls.limits ?? {});
    for (const area of [byId("ask"), byId("panel")]) {
      area.addEventListener("input", () => {
        this.refresh();
        onInput();
      });
    }
    byId("gap").addEventListener("click", () => this.#putGap());
    byId("clear").addEventListener("click", () => {
      const { source, n, seed, steps, temperature, infill, edit, keep, strength } = this.read();
      this.write({ source, n, seed, steps, temperature, infill, edit, keep, strength });
      onInput();
    });
  }

  // ---- what the model can be asked ----

  #offer() {
    const steered = Boolean(this.controls.field ?? this.controls.label ?? this.controls.pos);
    const offered = { ...this.controls, guidance: steered, candidates: steered || Boolean(this.controls.infill) };
    for (const part of document.querySelectorAll("[data-part]")) part.hidden = !offered[part.dataset.part];
    document.querySelector(".words-asked").hidden = !this.controls.contains && !this.controls.avoid;
    byId("ask").hidden = false;
    byId("source").required = Boolean(this.controls.source);
    const starts = Boolean(this.controls.infill ?? this.controls.edit);
    for (const part of [byId("start"), document.querySelector("[for='start']")]) part.hidden = !starts;
    byId("gap").hidden = !this.controls.infill;
    const tags = this.controls.pos?.tags ?? [];
    if (!tags.includes("PROPN")) byId("pos").placeholder = tags.slice(0, 5).join(" ");
    const labels = this.controls.span?.labels ?? [];
    if (!labels.includes("NP")) byId("span").placeholder = `0,1,${labels[0]}`;
  }

  // Examples in the empty fields, made of a text that this model has written.
  suggest(text) {
    const words = text.split(/\s+/).slice(0, 7);
    const gapped = words.map((word, i) => (i % 4 === 1 ? "___" : word)).join(" ") + (/\.$/.test(words.at(-1)) ? "" : " …");
    if (this.controls.infill && words.length > 2) {
      byId("start").placeholder = `Leave empty to start from noise, or type: ${gapped}`;
    }
    const [one = "", other = one] = words.filter((word) => /^\p{Ll}{4,}$/u.test(word)).sort((a, b) => b.length - a.length);
    if (one) byId("contains").placeholder = [...new Set([one, other])].join(", ");
    if (other) byId("avoid").placeholder = other;
    if (/^\p{L}+$/u.test(words[0])) byId("pattern").placeholder = `${words[0]} .*`;
  }

  #limit({ n = 8, steps = 200, candidates = 8 }) {
    byId("n").max = n;
    byId("steps").max = Math.max(Math.min(steps, 200), 1);
    byId("candidates").max = candidates;
    const { temperature } = this.facts; // 0, greedy, of some models
    byId("temperature").min = Math.min(byId("temperature").min, temperature);
    if (!this.controls.length) return;
    byId("length").max = this.controls.length.most;
    byId("length-unit").textContent = this.controls.length.unit;
  }

  #choices(key) {
    return Object.entries(this.controls[key] ?? {}).map(([name, values]) => {
      const label = make("label");
      const title = make("span", "", name.toLowerCase());
      const tally = make("span", "tally");
      tally.dataset.tally = `${key}.${name}`;
      title.append(" ", tally);
      const select = make("select");
      select.setAttribute("form", "ask");
      select.dataset.key = key;
      select.dataset.name = name;
      select.append(new Option("any", ""), ...values.map((value) => new Option(value, value)));
      label.append(title, select);
      return label;
    });
  }

  get #selects() {
    return document.querySelectorAll("select[data-key]");
  }

  #tag(tag) {
    const button = make("button", "", tag);
    button.type = "button";
    button.addEventListener("click", () => {
      byId("pos").value = `${byId("pos").value.trim()} ${tag}`.trim();
      byId("pos").dispatchEvent(new Event("input", { bubbles: true }));
    });
    return button;
  }

  #putGap() {
    const area = byId("start");
    area.setRangeText("___", area.selectionStart, area.selectionEnd, "end");
    area.focus();
    area.dispatchEvent(new Event("input", { bubbles: true }));
  }

  // ---- the request ----

  // Only what differs from the model's defaults, so that commands and URLs stay short.
  read() {
    const request = { n: Number(byId("n").value) };
    const put = (key, value) => {
      if (value !== undefined && value !== "" && value !== this.defaults[key]) request[key] = value;
    };
    if (this.controls.source) put("source", byId("source").value.trim());
    put("seed", Math.max(0, Math.floor(Number(byId("seed").value) || 0)));
    put("steps", Number(byId("steps").value));
    put("temperature", Number(byId("temperature").value));
    const start = byId("start").value.trim();
    if (start && this.#gaps(start)) request.infill = start;
    else if (start && this.controls.edit) Object.assign(request, this.#rewriting(start));
    else if (start) request.infill = `${start} ___`; // a model that cannot rewrite goes on instead
    if (byId("length").value) request.length = Number(byId("length").value);
    for (const select of this.#selects) {
      if (select.value) (request[select.dataset.key] ??= {})[select.dataset.name] = select.value;
    }
    for (const key of ["pos", "tree"]) put(key, byId(key).value.trim().replace(/\s+/g, " "));
    put("json_schema", byId("json_schema").value.trim());
    if (byId("span").value.trim()) request.span = byId("span").value.trim().split(/\s+/);
    for (const key of ["contains", "avoid"]) if (phrases(key).length) request[key] = phrases(key);
    if (byId("pattern").value) request.pattern = this.pattern.read();
    if (this.#steered(request)) put("guidance", Number(byId("guidance").value));
    if (this.#chooses(request)) put("candidates", Number(byId("candidates").value));
    return request;
  }

  #rewriting(text) {
    const request = { edit: text };
    if (phrases("keep").length) request.keep = phrases("keep");
    const strength = Number(byId("strength").value);
    if (strength !== this.defaults.strength) request.strength = strength;
    return request;
  }

  #gaps(text) {
    return this.controls.infill ? (text.match(GAP) ?? []).length : 0;
  }

  // Whether a classifier steers: only then has its strength an effect.
  #steered(request) {
    return ["field", "label", "pos", "tree", "span"].some((key) => key in request);
  }

  // Whether candidates can be compared: by classifiers, or by how well they fill gaps if nothing else is asked.
  #chooses(request) {
    return this.#steered(request) || ("infill" in request && this.asked(request) === 0);
  }

  write(request) {
    byId("source").value = request.source ?? "";
    byId("start").value = request.infill ?? request.edit ?? "";
    for (const key of [...SLIDERS, "seed"]) byId(key).value = request[key] ?? this.defaults[key];
    byId("length").value = request.length ?? "";
    for (const select of this.#selects) {
      const value = request[select.dataset.key]?.[select.dataset.name] ?? "";
      const known = [...select.options].some((option) => option.value === value);
      if (!known) select.append(new Option(value, value)); // the server will say what it thinks of it
      select.value = value;
    }
    for (const key of ["pos", "tree", "json_schema"]) byId(key).value = request[key] ?? "";
    byId("span").value = (request.span ?? []).join(" ");
    for (const key of PHRASES) byId(key).value = (request[key] ?? []).join(", ");
    this.pattern.write(request.pattern ?? []);
    if (GRAMMAR.some((key) => key in request)) byId("grammar").open = true;
    this.refresh();
  }

  // ---- what the panel says about itself ----

  refresh() {
    const request = this.read();
    for (const key of SLIDERS) byId(key).closest("label").querySelector("output").textContent = byId(key).value;
    byId("guidance").disabled = !this.#steered(request);
    byId("candidates").disabled = !this.#chooses(request);
    byId("rewriting").hidden = !("edit" in request) || this.controls.edit.noise === "none";
    byId("meaning").textContent = this.#meaning(request);
    for (const select of this.#selects) select.classList.toggle("set", select.value !== "");
    this.pattern.refresh(request.length);
    const asked = this.asked(request);
    byId("asked-count").textContent = asked ? `${asked} active` : "";
    const grammar = GRAMMAR.filter((key) => key in request).length;
    byId("grammar-count").textContent = grammar ? `${grammar} active` : "";
    byId("clear").disabled = asked === 0;
  }

  asked(request) {
    const many = (value) => (typeof value === "object" ? Object.keys(value).length : 1);
    const keys = ["length", "field", "label", "pos", "tree", "span", "contains", "avoid", "pattern", "json_schema"];
    return keys.reduce((sum, key) => sum + (key in request ? many(request[key]) : 0), 0);
  }

  #meaning(request) {
    if ("edit" in request && this.controls.edit.noise === "none") return "The model edits this text directly.";
    const { keeps } = this.controls.edit ?? {};
    if ("edit" in request && keeps && !this.#noised(request)) return `Said in other words: ${keeps} stay.`;
    if ("edit" in request) return "Part of the noise is added back, and the text is rewritten from there.";
    if (!("infill" in request)) return "";
    const gaps = this.#gaps(request.infill);
    return `${gaps === 1 ? "The gap is" : `${gaps} gaps are`} filled; all other words are kept.`;
  }

  // Whether a text is noised by a model that could say it in other words.
  #noised(request) {
    return "strength" in request || this.asked(request) > 0;
  }

  // How many of the texts meet each constraint: next to the control, as a symbol and a number.
  tally(texts) {
    const counts = new Map();
    for (const { controls } of texts) {
      for (const { name, target, satisfied } of controls) {
        const key = name === "field" || name === "label" ? `${name}.${String(target).split("=")[0]}` : name;
        const count = counts.get(key) ?? { met: 0, open: 0, all: 0 };
        count.all += 1;
        count.met += satisfied === true;
        count.open += satisfied === null;
        counts.set(key, count);
      }
    }
    for (const place of document.querySelectorAll("[data-tally]")) say(place, counts.get(place.dataset.tally));
  }
}

function say(place, count) {
  place.classList.remove("met", "missed", "open");
  place.textContent = "";
  if (!count) return;
  const kind = count.open === count.all ? "open" : count.met + count.open === count.all ? "met" : "missed";
  place.classList.add(kind);
  const sign = { met: "✓", missed: "✗", open: "–" }[kind];
  place.textContent = kind === "open" ? sign : `${sign} ${count.met}/${count.all}`;
  place.title = kind === "open" ? "not checked" : `met by ${count.met} of ${count.all} texts`;
}

function phrases(key) {
  return byId(key).value.split(",").map((phrase) => phrase.trim()).filter(Boolean);
}

function labels(offer) {
  return (offer?.labels ?? []).join(" ");
}
