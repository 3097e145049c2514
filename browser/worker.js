// Runs the model beside the page, so that the page can move: requests come in, frames and texts go out.
import { fetchModel } from "./network.js";
import { Refused, readTokenizer } from "./texts.js";
import { write } from "./writing.js";

const EVERY = 250; // milliseconds between two reports of the download
let current = 0; // the number of the request that is being answered
let said = 0;

const ready = fetchModel((share) => {
  if (performance.now() - said < EVERY && share < 1) return;
  said = performance.now();
  postMessage({ loaded: share });
}).then((model) => [model, readTokenizer(model.config.tokenizer)]);
ready.then(
  ([{ config: { tokenizer, lengths, ...facts } }, { unit, pieces }]) => {
    postMessage({ facts: { ...facts, unit, pieces: pieces.length } });
  },
  (error) => postMessage({ failed: error.message }),
);

addEventListener("message", async ({ data: { number, request, pace } }) => {
  current = number;
  if (!request) return; // stop
  const [model, tokenizer] = await ready, begun = performance.now();
  let seconds = 0, due = begun;
  try {
    const writing = write(model, tokenizer, request);
    for (;;) {
      const from = performance.now(), { value, done } = writing.next();
      if (done) return;
      seconds += (performance.now() - from) / 1000;
      postMessage({ number, ...value, seconds, steps: request.steps });
      due = Math.max(due + pace, performance.now());
      await new Promise((resolve) => setTimeout(resolve, due - performance.now())); // a stop, or another request
      if (current !== number) return;
    }
  } catch (error) {
    postMessage({ number, refused: error instanceof Refused ? error.message : `The model failed: ${error.message}` });
  }
});
