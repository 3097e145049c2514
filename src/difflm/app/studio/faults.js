// Show an error at the field it concerns: the server's message begins with the field's name.
import { byId, make } from "./parts.js";

const ELSEWHERE = { infill: "start", edit: "start", "json schema": "json_schema" }; // keys of a request whose fields have another name
const PLACES = [
  "source", "infill", "edit", "keep", "strength", "length", "contains", "avoid", "pattern", "pos", "tree", "span", "n",
  "seed", "steps", "temperature", "guidance", "candidates", "json schema",
];

// Returns false if the message concerns no field on the page.
export function showAtField(message) {
  const field = fieldOf(message);
  if (!field || field.closest("[hidden]")) return false;
  for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  const said = message.replace(/^[\w ,.-]+: /, "");
  const note = make("p", "wrong", said[0].toUpperCase() + said.slice(1));
  note.id = "field-wrong";
  note.setAttribute("role", "alert");
  (field.closest("label") ?? field).after(note);
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-errormessage", note.id);
  field.addEventListener("input", clearFields, { once: true });
  field.focus();
  return true;
}

export function clearFields() {
  byId("field-wrong")?.remove();
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
}

function fieldOf(message) {
  const text = message.toLowerCase().replace(/^-+/, "");
  const key = PLACES.find((name) => text.startsWith(name) && !/\w/.test(text[name.length] ?? ""));
  if (key) return byId(ELSEWHERE[key] ?? key);
  return [...document.querySelectorAll("select[data-key]")].find((select) =>
    text.startsWith(`${select.dataset.name.toLowerCase()}: `));
}
