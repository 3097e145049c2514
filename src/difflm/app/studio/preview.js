// A faster model's texts for a request: drafts to read until the chosen model has finished its own.
import { stream } from "./api.js";

const SETTINGS = ["steps", "temperature", "guidance", "candidates"]; // of the chosen model; the faster one has its own

// Nothing is missing without it, so nobody hears of one that is refused, fails or is stopped.
export async function preview(request, model, faster, signal, show) {
  if (!faster || (request.steps ?? model.steps) <= faster.steps) return;
  const same = Object.fromEntries(Object.entries(request).filter(([key]) => !SETTINGS.includes(key)));
  try {
    for await (const [name, data] of stream(same, signal, giveUp, faster.name)) {
      if (signal.aborted) return;
      const steps = data.steps === 1 ? "one step" : `${data.steps} steps`;
      if (name === "text") show(data.sample, data.text, `Draft in ${steps} by ${faster.name}`);
    }
  } catch {
    // the chosen model writes on
  }
}

function giveUp() {
  throw new Error("The server is busy: its time is for the text that was asked for.");
}
