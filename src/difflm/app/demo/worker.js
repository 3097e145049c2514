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
  ([{ config: { tokenizer, lengths, ...facts } }, { unit }]) => postMessage({ facts: { ...facts, unit } }),
  (error) => postMessage({ failed: error.message }),
);

addEventListener("message", async ({ data: { number, request } }) => {
  current = number;
  if (!request) return; // stop
  const [model, tokenizer] = await ready, begun = performance.now();
  try {
    for (const made of write(model, tokenizer, request)) {
      postMessage({ number, ...made, seconds: (performance.now() - begun) / 1000 });
      await new Promise((resolve) => setTimeout(resolve)); // a stop, or another request
      if (current !== number) return;
    }
  } catch (error) {
    postMessage({ number, refused: error instanceof Refused ? error.message : `The model stopped: ${error.message}` });
  }
});
