// A request in its four forms: an object for the server, the address of the page, a command, Python.
//
// Keys are those of `difflm generate`; missing keys have the model's defaults.

const NUMBERS = ["n", "seed", "steps", "temperature", "length", "guidance", "candidates", "strength"];
const TEXTS = ["source", "infill", "edit", "pos", "tree", "json_schema"];
const LISTS = ["contains", "avoid", "pattern", "keep", "span"];
const TABLES = ["field", "label"];
const ORDER = [
  "source", "n", "seed", "steps", "temperature", "candidates", "guidance", "infill", "edit", "keep", "strength", "length",
  "field", "label", "pos", "tree", "span", "contains", "avoid", "pattern", "json_schema",
];

// `model` is named where several are served.
export function toHash(request, model = "") {
  const pairs = model ? [["model", model]] : [];
  for (const key of ORDER) {
    const value = request[key];
    if (value === undefined) continue;
    if (LISTS.includes(key)) pairs.push(...value.map((item) => [key, item]));
    else if (TABLES.includes(key)) pairs.push(...Object.entries(value).map(([name, item]) => [`${key}.${name}`, item]));
    else pairs.push([key, value]);
  }
  return `#${new URLSearchParams(pairs)}`;
}

export function fromHash(hash) {
  const request = {};
  for (const [name, value] of new URLSearchParams(hash.slice(1))) {
    const [key, ...rest] = name.split(".");
    if (NUMBERS.includes(key) && value !== "" && Number.isFinite(Number(value))) request[key] = Number(value);
    else if (TEXTS.includes(key)) request[key] = value;
    else if (LISTS.includes(key)) (request[key] ??= []).push(value);
    else if (TABLES.includes(key) && rest.length) (request[key] ??= {})[rest.join(".")] = value;
  }
  return request;
}

// ---- the command ----

export function command(model, request) {
  const words = ["difflm", "generate", model];
  for (const key of ORDER) {
    const value = request[key];
    if (value === undefined) continue;
    const option = key === "n" ? "-n" : `--${key.replace("_", "-")}`;
    if (LISTS.includes(key)) words.push(...value.flatMap((item) => [option, item]));
    else if (TABLES.includes(key)) words.push(...Object.entries(value).flatMap(([k, v]) => [option, `${k}=${v}`]));
    else words.push(option, String(value));
  }
  if (request.label) words.push("--guide", "DIR");
  return words.map(quoted).join(" ");
}

function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;
}

// ---- Python ----

const CONTROLS = {
  infill: (v) => [`Infill(${literal(v)})`],
  length: (v) => [`Length(${v})`],
  field: (v) => Object.entries(v).map(([name, value]) => `Field(${literal(name)}, ${literal(value)})`),
  label: (v) => Object.entries(v).map(([name, value]) => `Label(${literal(name)}, ${literal(value)})`),
  pos: (v) => [`Tags(${tuple(v.split(/\s+/))})`],
  tree: (v) => [`Tree(${literal(v)})`],
  span: (v) => v.map((item) => `Span(${spanParts(item)})`),
  contains: (v) => v.map((phrase) => `Contains(${literal(phrase)})`),
  avoid: (v) => v.map((word) => `Avoid(${literal(word)})`),
  pattern: (v) => v.map((regex) => `Pattern(${literal(regex)})`),
  json_schema: (v) => [`Json(${literal(v)})`],
};

export function python(model, request) {
  const controls = Object.entries(CONTROLS).flatMap(([key, write]) => (key in request ? write(request[key]) : []));
  const names = new Set(["TextDiffusion", ...controls.map((control) => control.slice(0, control.indexOf("(")))]);
  const given = [String(request.n ?? 1)];
  if ("source" in request) given.push(`source=${literal(request.source)}`);
  for (const key of ["seed", "steps", "temperature", "candidates"]) {
    if (key in request) given.push(`${key}=${request[key]}`);
  }
  if (controls.length) given.push(listed(controls));
  if ("edit" in request) {
    names.add("Edit");
    given.push(`edit=Edit(${literal(request.edit)}, ${request.strength ?? "None"}, ${tuple(request.keep ?? [])})`);
  }
  const lines = [];
  if ("guidance" in request) {
    lines.push("from dataclasses import replace", "");
    given.push(`guidance=replace(STANDARD, size=${request.guidance})`);
  }
  lines.push(`from difflm import ${[...names].sort().join(", ")}`);
  if ("guidance" in request) lines.push("from difflm.controls.guidance import STANDARD");
  const guided = request.label ? '.guided_by("DIR")' : "";
  lines.push("", `lm = TextDiffusion.from_pretrained(${literal(model)})${guided}`);
  const oneLine = `for text in lm.generate(${given.join(", ")}):`;
  if (oneLine.length <= 100 && !oneLine.includes("\n")) lines.push(oneLine);
  else lines.push("for text in lm.generate(", ...given.map((argument) => `    ${argument},`), "):");
  return [...lines, "    print(text, text.controls)"].join("\n");
}

function listed(controls) {
  const line = `controls=[${controls.join(", ")}]`;
  if (line.length <= 80) return line;
  return ["controls=[", ...controls.map((control) => `        ${control},`), "    ]"].join("\n");
}

function literal(text) {
  return JSON.stringify(text); // a Python string as well
}

function tuple(items) {
  return `(${items.map(literal).join(", ")}${items.length === 1 ? "," : ""})`;
}

function spanParts(item) {
  const [first, last, label] = item.split(",");
  return `${first}, ${last}, ${literal(label ?? "")}`;
}
