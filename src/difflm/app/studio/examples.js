// Example requests for the model, as the server gives them, limited to what it supports.
import { byId, make } from "./parts.js";

function supported({ examples }, controls) {
  return examples.filter(({ request }) => Object.keys(request).every((key) => controls[key] !== null));
}

export function welcome(model, controls, n) {
  const [first] = supported(model, controls);
  return { n, ...first?.request };
}

export function offerExamples(model, controls, n, onChoose) {
  const buttons = supported(model, controls).map(({ name, request }) => {
    const button = make("button", "example", name);
    button.type = "button";
    button.addEventListener("click", () => onChoose({ n, ...request }));
    return button;
  });
  if (buttons.length) byId("examples").append("Try ", ...buttons);
}
