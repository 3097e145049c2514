// Example requests, limited to what the model supports. The sentences come from E2E.
import { byId, make } from "./parts.js";

export function welcome(controls, n) {
  const request = { n };
  const food = controls.field?.food;
  if (food?.length) request.field = { food: food.includes("Japanese") ? "Japanese" : food[0] };
  if (food && controls.length) request.length = 18;
  return request;
}

export function offerExamples(controls, n, onChoose) {
  if (!controls.field?.food) return;
  const examples = [
    [controls.infill, "gaps", { infill: "The ___:2 is a ___ near Café Rouge.", field: { food: "Indian" } }],
    [controls.edit, "a rewrite", { edit: "The Mill is a cheap pub near the river.", keep: ["Mill"], strength: 0.4 }],
    [controls.pos, "tags", { pos: "PROPN AUX DET ADJ NOUN ADP DET NOUN PUNCT" }],
    [controls.contains, "words", { contains: ["coffee shop", "riverside"], avoid: ["cheap"], length: 20 }],
    [true, "best of four", { field: { area: "riverside", price: "high" }, length: 16, candidates: 4, n: 2 }],
  ];
  const buttons = examples.filter(([offered]) => offered).map(([, name, request]) => {
    const button = make("button", "example", name);
    button.type = "button";
    button.addEventListener("click", () => onChoose({ n, ...request }));
    return button;
  });
  byId("examples").append("Try ", ...buttons);
}
