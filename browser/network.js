// The model in the memory of the kernels, and its Transformer: networks/transformer.py for one text, without training.
const FREQUENCIES = 64; // cosines, and as many sines, that tell the time
const here = (name) => new URL(name, import.meta.url);

export async function fetchModel(tell = () => {}) {
  const config = await (await found("model.json")).json();
  const { instance } = await WebAssembly.instantiate(await (await found("kernels.wasm")).arrayBuffer());
  const memory = new Memory(instance.exports);
  const at = memory.take(config.bytes);
  let read = 0;
  for (const reader = (await found("model.safetensors")).body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (read + value.length > config.bytes) throw new Error("model.safetensors is not the file that model.json tells of.");
    memory.bytes.set(value, at + read);
    read += value.length;
    tell(read / config.bytes);
  }
  if (read < config.bytes) throw new Error("model.safetensors is truncated.");
  return new Model(config, memory, readTensors(memory, at));
}

async function found(name) {
  const answer = await fetch(here(name));
  if (!answer.ok) throw new Error(`${name} cannot be read (${answer.status}).`);
  return answer;
}

// Where each tensor of a safetensors file lies: a length, a header in JSON, and the numbers.
function readTensors(memory, at) {
  const size = Number(new DataView(memory.bytes.buffer).getBigUint64(at, true));
  const header = JSON.parse(new TextDecoder().decode(memory.bytes.slice(at + 8, at + 8 + size)));
  const tensors = {};
  for (const [name, { shape, data_offsets: [begin] }] of Object.entries(header)) {
    if (name !== "__metadata__") tensors[name] = { at: at + 8 + size + begin, shape };
  }
  return tensors;
}

// Room is only ever taken; addresses are in bytes, views of the same memory in numbers.
class Memory {
  constructor(kernels) {
    Object.assign(this, { kernels, end: kernels.__heap_base.value });
  }

  take(bytes) {
    const at = Math.ceil(this.end / 16) * 16;
    this.end = at + bytes;
    const missing = this.end + 64 - this.kernels.memory.buffer.byteLength;
    if (missing > 0) this.kernels.memory.grow(Math.ceil(missing / 65536));
    if (this.bytes?.buffer !== this.kernels.memory.buffer) {
      const { buffer } = this.kernels.memory;
      Object.assign(this, { bytes: new Uint8Array(buffer), floats: new Float32Array(buffer), ints: new Int32Array(buffer) });
    }
    return at;
  }

  // Numbers of four bytes, as an address.
  room(...sizes) {
    return this.take(4 * sizes.reduce((all, size) => all * size, 1));
  }

  slice(at, count) {
    return this.floats.subarray(at / 4, at / 4 + count);
  }
}

export class Model {
  constructor(config, memory, tensors) {
    Object.assign(this, { config, memory, tensors, kernels: memory.kernels });
    const { longest, hidden, heads, vocabulary } = config;
    this.table = tensors["denoiser.codec.raw"].at;
    this.hidden = memory.room(longest, hidden);
    this.normed = memory.room(longest, hidden);
    this.wide = memory.room(longest, 4 * hidden);
    this.scores = memory.room(longest);
    this.logits = memory.room(longest, vocabulary);
    this.drawn = memory.room(longest, Math.max(3, config.dim));
    this.told = memory.room(2 * FREQUENCIES);
    this.moved = memory.room(512);
    this.modulations = Array.from({ length: config.layers }, () => memory.room(6 * hidden));
    this.#turn(longest, hidden / heads);
    if (config.timed) this.#foldOnes();
  }

  // Cosines and sines of every position's rotation.
  #turn(longest, dim) {
    const half = dim / 2;
    this.cosines = this.memory.room(longest, half);
    this.sines = this.memory.room(longest, half);
    const [cosines, sines] = [this.cosines, this.sines].map((at) => this.memory.slice(at, longest * half));
    for (let i = 0; i < longest * half; i++) {
      const angle = Math.fround(Math.floor(i / half) * Math.fround(10_000 ** (-2 * (i % half) / dim)));
      [cosines[i], sines[i]] = [Math.cos(angle), Math.sin(angle)];
    }
  }

  // A norm is multiplied by 1 + its scale: the 1 becomes a part of the bias.
  #foldOnes() {
    const { hidden } = this.config;
    for (let i = 0; i < this.config.layers; i++) {
      const bias = this.memory.slice(this.#named(`blocks.${i}.modulation.bias`).at, 6 * hidden);
      for (const first of [hidden, 4 * hidden]) for (let k = 0; k < hidden; k++) bias[first + k] += 1;
    }
  }

  #named(name) {
    return this.tensors[`denoiser.network.${name}`];
  }

  #multiply(name, x, y, rows) {
    const { at, shape: [outs, ins] } = this.#named(`${name}.weight`);
    const scale = this.#named(`${name}.weight.scale`).at;
    this.kernels.multiply(x, at, scale, this.#named(`${name}.bias`).at, y, rows, ins, outs);
  }

  // States behind the last layer of `rows` positions, from what the network reads of them and the time.
  run(inputs, t, rows) {
    const { kernels, hidden: x, config: { hidden, heads, layers, timed } } = this;
    this.#multiply("input", inputs, x, rows);
    this.#addPlaces(rows);
    if (timed) this.#tellTime(t);
    for (let i = 0; i < layers; i++) {
      const own = this.modulations[i], part = (k) => own + 4 * k * hidden;
      const [shift, scale, gate] = timed ? [part(0), part(1), part(2)] : this.#affine(`blocks.${i}.norm_1`);
      kernels.normalise(x, shift, scale, this.normed, rows, hidden);
      this.#multiply(`blocks.${i}.attention.qkv`, this.normed, this.wide, rows);
      kernels.attend(this.wide, this.cosines, this.sines, this.scores, this.normed, rows, heads, hidden / heads);
      this.#multiply(`blocks.${i}.attention.out`, this.normed, this.wide, rows);
      kernels.add(x, this.wide, gate, rows, hidden);
      const [shift2, scale2, gate2] = timed ? [part(3), part(4), part(5)] : this.#affine(`blocks.${i}.norm_2`);
      kernels.normalise(x, shift2, scale2, this.normed, rows, hidden);
      this.#multiply(`blocks.${i}.feed.0`, this.normed, this.wide, rows);
      kernels.gelu(this.wide, rows * 4 * hidden);
      this.#multiply(`blocks.${i}.feed.2`, this.wide, this.normed, rows);
      kernels.add(x, this.normed, gate2, rows, hidden);
    }
  }

  #affine(name) {
    return [this.#named(`${name}.bias`).at, this.#named(`${name}.weight`).at, 0];
  }

  // Each position is told its distance from the start and from the end.
  #addPlaces(rows) {
    const places = this.#named("places");
    if (!places) return;
    const { hidden } = this.config, [, most] = places.shape;
    for (let r = 0; r < rows; r++) {
      for (const place of [r, most + rows - 1 - r]) {
        this.kernels.add(this.hidden + 4 * r * hidden, places.at + 4 * place * hidden, 0, 1, hidden);
      }
    }
  }

  #tellTime(t) {
    const told = this.memory.slice(this.told, 2 * FREQUENCIES), moved = this.memory.slice(this.moved, 512);
    for (let k = 0; k < FREQUENCIES; k++) {
      const angle = Math.fround(Math.fround(1000 * t) * Math.fround(10_000 ** (-k / FREQUENCIES)));
      [told[k], told[k + FREQUENCIES]] = [Math.cos(angle), Math.sin(angle)];
    }
    this.#multiply("embed_time.0", this.told, this.moved, 1);
    moved.forEach((value, k) => { moved[k] = silu(value); });
    this.#multiply("embed_time.2", this.moved, this.told, 1);
    const mean = told.reduce((sum, value) => sum + value, 0) / told.length;
    const spread = Math.sqrt(told.reduce((sum, value) => sum + (value - mean) ** 2, 0) / told.length + 1e-5);
    told.forEach((value, k) => { told[k] = silu((value - mean) / spread) / Math.sqrt(told.length); });
    for (let i = 0; i < this.config.layers; i++) this.#multiply(`blocks.${i}.modulation`, this.told, this.modulations[i], 1);
  }

  // Logits of the words at some positions, a row each, in `this.logits`.
  answer(places) {
    const { hidden } = this.config, states = this.memory.slice(this.hidden, this.config.longest * hidden);
    places.forEach((place, row) => states.copyWithin(row * hidden, place * hidden, (place + 1) * hidden)); // they rise
    this.kernels.normalise(this.hidden, ...this.#affine("norm").slice(0, 2), this.normed, places.length, hidden);
    this.#multiply("head", this.normed, this.logits, places.length);
  }

  // Uniform numbers of a step and a stream: those of diffusion/noise.py for sample 0 of the seed.
  uniform(seed, stream, step, rows, columns) {
    this.kernels.uniform(seed, stream, step, rows, columns, this.drawn);
    return this.memory.slice(this.drawn, Math.max(1, rows) * Math.max(1, columns));
  }
}

const silu = (x) => x / (1 + Math.exp(-x));
