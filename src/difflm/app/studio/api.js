// Communication with the server: requests, the stream of frames, and readable errors.
import { askToken } from "./token.js";

export class Refused extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

export class Lost extends Error {
  constructor() {
    super("The connection to the server was lost. Is difflm studio still running?");
  }
}

let token = recall();
let model = ""; // of several that are served, the one that is asked; the first where none is named

export function useModel(name) {
  model = name;
}

function ask(path, name = model) {
  return name ? `${path}?model=${encodeURIComponent(name)}` : path;
}

// `#token=…` in the address, as `difflm studio` opens it, or what was typed before in this tab.
function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = given.get("token");
  if (found === null) return stored();
  given.delete("token");
  history.replaceState(null, "", `#${given}`);
  remember(found);
  return found;
}

function stored() {
  try {
    return sessionStorage.getItem("difflm-token");
  } catch {
    return null; // storage is closed
  }
}

function remember(value) {
  try {
    sessionStorage.setItem("difflm-token", value);
  } catch {
    // then it is asked for again
  }
}

async function call(path, body, signal) {
  const used = token;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (fault) {
    throw fault.name === "AbortError" ? fault : new Lost();
  }
  if (response.ok) return response;
  if (response.status === 401) {
    if (token === used) token = await askToken(Boolean(used)); // or another call has asked meanwhile
    remember(token);
    return call(path, body, signal);
  }
  const wait = Number(response.headers.get("Retry-After")) || 1;
  throw new Refused(await sentence(response), response.status, wait);
}

async function sentence(response) {
  try {
    const { error } = await response.json();
    if (error?.message) return spoken(error.message);
  } catch {
    // no JSON: the status must do
  }
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}

function spoken(message) {
  return message[0].toUpperCase() + message.slice(1);
}

// A full server says when to try again: wait that long, and report it through `onWait(seconds)`.
async function patiently(path, body, signal, onWait) {
  for (;;) {
    try {
      return await call(path, body, signal);
    } catch (fault) {
      if (fault.status !== 429) throw fault;
      for (let left = fault.retryAfter; left > 0; left--) {
        onWait?.(left);
        await pause(1000, signal);
      }
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

export async function get(path) {
  return (await call(ask(path))).json();
}

export async function judgePattern(pattern, signal) {
  return (await call(ask("api/pattern"), { pattern }, signal)).json();
}

// For each word of a text how likely it is given the others, and which words are likely in its place.
export async function weighWords(text) {
  return (await call(ask("api/alternatives"), { text })).json();
}

export async function player(request, signal, onWait) {
  return (await patiently(ask("api/player"), { request }, signal, onWait)).blob();
}

// Every event of a request that is being made, as [name, data]; ends with "done".
export async function* stream(request, signal, onWait, name) {
  const response = await patiently(ask("api/stream", name), request, signal, onWait);
  for await (const [name, data] of events(response.body.getReader())) {
    if (name === "error") throw new Refused(spoken(data.message ?? data.error?.message ?? "it failed."), 500);
    yield [name, data];
    if (name === "done") return;
  }
  throw new Lost();
}

async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event) yield event;
      }
    }
  } catch (fault) {
    throw fault.name === "AbortError" ? fault : new Lost();
  }
}

// A block without data is a comment that keeps the line open.
function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
