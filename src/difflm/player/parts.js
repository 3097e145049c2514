// Small parts that every page of texts uses: elements, marks, the clipboard, the theme.
export const byId = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// The verdict on a control: a symbol, a word and a class.
export function verdict(satisfied) {
  if (satisfied === true) return { sign: "✓", meaning: "met", kind: "met" };
  if (satisfied === false) return { sign: "✗", meaning: "missed", kind: "missed" };
  return { sign: "–", meaning: "not checked", kind: "open" };
}

export function controlItem(control) {
  const { sign, meaning, kind } = verdict(control.satisfied);
  const item = make("li", kind);
  const mark = make("span", "mark", sign);
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", meaning);
  item.append(mark, make("span", "name", control.name), make("span", "target", wordsOf(control.target)));
  const notes = [meaning];
  if (typeof control.score === "number") notes.push(`score ${Number(control.score.toFixed(3))}`);
  if (control.checker?.startsWith("none: ")) notes.push(control.checker.slice("none: ".length));
  else if (control.checker) notes.push(`checked by ${control.checker}`);
  item.title = notes.join(", ");
  return item;
}

// Why texts may not be as requested; hidden if there are no warnings.
export function warn(place, warnings = []) {
  place.textContent = warnings.join(" ");
  place.hidden = warnings.length === 0;
}

export function wordsOf(target) {
  if (target === null || target === undefined || target === true) return "";
  if (Array.isArray(target)) return target.map(wordsOf).join(" ");
  if (typeof target !== "object") return String(target);
  return Object.entries(target).map(([name, value]) => `${name}=${wordsOf(value)}`).join(" ");
}

export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text, button);
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Where the clipboard is closed to pages from a file. Beside the button: a dialog lets nothing outside be selected.
function copyBySelection(text, button) {
  const area = make("textarea", "aside");
  area.value = text;
  button.after(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  button.focus();
}

// The theme is the system's until the button is pressed.
export function themed(button) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    const other = name === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = name;
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
  }
  button.addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  theme(dark.matches ? "dark" : "light");
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");
