// From noise to words: the steps of diffusion/samplers for one text. Frames are {step, t, ids, confidence, last}.
//
// What is asked: `seed`, `steps`, `known` (an id at every position, FREE where there is none) and `banned`, which says for
// a position which ids may not stand there, beside those that no text may hold.
export const FREE = -1;
const LOWEST_LOG_SNR = -20;
const FINE = 2 ** -23;

export function* denoise(model, asked) {
  yield* model.config.state === "masks" ? unmask(model, asked) : denoiseVectors(model, asked);
}

// -- vectors: diffusion/processes/gaussian.py, codecs/embedding.py ----------------------------------------------------

function levelAt(t, { s, shift }) {
  const angle = ((t + s) / (1 + s)) * (Math.PI / 2);
  const logSnr = Math.max(LOWEST_LOG_SNR, -2 * Math.log(Math.abs(Math.tan(angle)))) + shift;
  return { t, logSnr, alpha: Math.sqrt(sigmoid(logSnr)), sigma: Math.sqrt(sigmoid(-logSnr)) };
}

// x_s = a x_t + b x̂_0 + c · noise.
const STEPS = {
  ancestral(late, early) {
    const fresh = -Math.expm1(late.logSnr - early.logSnr);
    const kept = (late.alpha / early.alpha) * (early.sigma / late.sigma) ** 2;
    return [kept, early.alpha * fresh, early.sigma * Math.sqrt(Math.max(0, fresh))];
  },
  ddim(late, early) {
    const kept = early.sigma / late.sigma;
    return [kept, early.alpha - kept * late.alpha, 0];
  },
};

export class Vectors {
  constructor(model) {
    const { memory, config: { longest, vocabulary, dim } } = model;
    Object.assign(this, { model, dim });
    this.inputs = memory.room(longest, 3 * dim);
    this.scaled = memory.room(longest, dim);
    this.evidence = memory.room(longest, vocabulary);
    this.shares = memory.room(longest, vocabulary);
    this.mean = memory.room(longest, dim);
    this.squares = memory.room(vocabulary);
    const table = memory.slice(model.table, vocabulary * dim);
    this.lengths = Float32Array.from({ length: vocabulary }, (_, w) => {
      return table.subarray(w * dim, (w + 1) * dim).reduce((sum, value) => sum + value * value, 0);
    });
  }

  // Logits of the words at some `places`, their parts from x_t and from context, by the network.
  believe(x, previous, level, rows, places) {
    const { model, dim } = this, { memory, kernels, config: { vocabulary, evidence: shown } } = model;
    const { t, alpha, sigma } = level;
    const scaled = memory.slice(this.scaled, rows * dim), squares = memory.slice(this.squares, vocabulary);
    const evidence = memory.slice(this.evidence, rows * vocabulary), shares = memory.slice(this.shares, rows * vocabulary);
    if (shown) {
      x.forEach((value, k) => { scaled[k] = value * (alpha / sigma ** 2); });
      this.lengths.forEach((value, w) => { squares[w] = -0.5 * (alpha / sigma) ** 2 * value; });
      kernels.multiply(this.scaled, model.table, 0, this.squares, this.evidence, rows, dim, vocabulary);
      const bias = memory.slice(model.tensors["denoiser.codec.bias"].at, vocabulary);
      for (let k = 0; k < evidence.length; k++) shares[k] = evidence[k] + bias[k % vocabulary];
      kernels.softmax(this.shares, rows, vocabulary);
      kernels.mix(this.shares, model.table, this.mean, rows, vocabulary, dim);
    }
    const read = [x, previous, ...(shown ? [memory.slice(this.mean, rows * dim)] : [])];
    const inputs = memory.slice(this.inputs, rows * dim * read.length);
    for (let r = 0; r < rows; r++) {
      read.forEach((part, k) => inputs.set(part.subarray(r * dim, (r + 1) * dim), (r * read.length + k) * dim));
    }
    model.run(this.inputs, t, rows);
    model.answer(places);
    return { logits: memory.slice(model.logits, places.length * vocabulary), evidence: shown ? evidence : null };
  }
}

function* denoiseVectors(model, { seed, steps, known, banned }) {
  const { memory, kernels, config: { vocabulary, dim, schedule, warp, temperature, sampler, forbidden } } = model;
  const scale = model.config.noise_temperature;
  model.vectors ??= new Vectors(model);
  const rows = known.length, places = freePlaces(known), table = memory.slice(model.table, vocabulary * dim);
  const normal = (step) => Float32Array.from(model.uniform(seed, 0, step, rows, dim), (u) => scale * quantile(u));
  const grid = Array.from({ length: steps + 1 }, (_, i) => levelAt(interpolate(1 - i / steps, ...warp), schedule));
  let x = normal(0), clean = new Float32Array(rows * dim);
  for (let i = 0; i < steps; i++) {
    const { logits, evidence } = model.vectors.believe(x, clean, grid[i], rows, places);
    places.forEach((place, row) => {
      const own = logits.subarray(row * vocabulary, (row + 1) * vocabulary);
      own.forEach((value, w) => { own[w] = value / temperature + (evidence ? evidence[place * vocabulary + w] : 0); });
      for (const w of [...forbidden, ...banned(place)]) own[w] = -Infinity;
    });
    kernels.softmax(model.logits, places.length, vocabulary);
    kernels.mix(model.logits, model.table, model.vectors.mean, places.length, vocabulary, dim);
    const mean = memory.slice(model.vectors.mean, rows * dim), [ids, confidence] = likeliest(known, places, logits, vocabulary);
    clean = new Float32Array(rows * dim);
    known.forEach((id, r) => { if (id !== FREE) clean.set(table.subarray(id * dim, (id + 1) * dim), r * dim); });
    places.forEach((place, row) => clean.set(mean.subarray(row * dim, (row + 1) * dim), place * dim));
    yield { step: i, t: grid[i + 1].t, ids, confidence, last: i + 1 === steps };
    const [a, b, c] = STEPS[sampler](grid[i], grid[i + 1]), noise = c ? normal(i + 1) : null;
    x = x.map((value, k) => a * value + b * clean[k] + (c ? c * noise[k] : 0));
  }
}

// -- masks: diffusion/processes/interpolating.py (Absorbing) ----------------------------------------------------------

// Probabilities of the words at the masks of x, a row each, and where those are.
export function believeMasks(model, x, banned, temperature) {
  const { memory, kernels, tensors, config: { hidden, longest, vocabulary, forbidden } } = model;
  model.ids ??= memory.room(longest);
  model.inputs ??= memory.room(longest, hidden);
  memory.ints.set(x, model.ids / 4);
  kernels.look_up(model.ids, model.table, tensors["denoiser.codec.raw.scale"].at, model.inputs, x.length, hidden);
  model.run(model.inputs, 0, x.length);
  const places = [...x.keys()].filter((r) => x[r] === vocabulary);
  model.answer(places);
  const shares = memory.slice(model.logits, places.length * vocabulary);
  if (temperature !== 1) shares.forEach((value, k) => { shares[k] = value / temperature; });
  places.forEach((place, row) => {
    for (const w of [...forbidden, ...banned(place)]) shares[row * vocabulary + w] = -Infinity;
  });
  kernels.softmax(model.logits, places.length, vocabulary);
  return [shares, places];
}

// Which masks become words on the way from t to s, by their rows; `now` is {shares, places, words, fresh, t, s}.
const WRITES = {
  ancestral: ({ places, fresh, t, s }) => rowsOf(places).filter((row) => fresh[3 * places[row]] >= 1 - (t - s) / t),
  "first-hitting": (now) => foremost(now, (row) => now.fresh[3 * now.places[row]]),
  confidence: (now) => foremost(now, (row) => now.shares[row * now.vocabulary + now.words[row]]),
};
const rowsOf = (places) => [...places.keys()];

// Those of the highest rank, so that as many masks stay as the schedule leaves at s, and one becomes a word at least.
function foremost({ places, t, s }, rank) {
  const left = Math.min(Math.floor((places.length * s) / t + 1e-6), places.length - 1);
  const ranks = rowsOf(places).map(rank);
  return rowsOf(places).sort((a, b) => ranks[a] - ranks[b]).slice(left);
}

function* unmask(model, { seed, steps, known, banned, gaps }) {
  const { vocabulary, temperature, sampler } = { ...model.config, ...gaps };
  const x = Int32Array.from(known, (id) => (id === FREE ? vocabulary : id));
  let belief = null; // the network is not told the time: it holds until a word is written
  for (let i = 0, last = false; !last; i++) {
    const [t, s] = [1 - i / steps, 1 - (i + 1) / steps];
    const [shares, places] = belief ??= believeMasks(model, x, banned, temperature);
    const [ids, confidence] = likeliest(x, places, shares, vocabulary);
    const fresh = Float32Array.from(model.uniform(seed, 0, i + 1, x.length, 3));
    const own = (row) => shares.subarray(row * vocabulary, (row + 1) * vocabulary);
    const words = places.map((place, row) => draw(own(row), fresh[3 * place + 1] + (fresh[3 * place + 2] - 0.5) * FINE));
    for (const row of WRITES[sampler]({ shares, vocabulary, places, words, fresh, t, s })) {
      ids[places[row]] = x[places[row]] = words[row];
      confidence[places[row]] = own(row)[words[row]];
      belief = null;
    }
    last = i + 1 === steps || (sampler !== "ancestral" && !x.includes(vocabulary));
    yield { step: i, t: s, ids, confidence, last };
  }
}

// A word by its share and a uniform number.
function draw(shares, u) {
  const value = u * shares.reduce((sum, share) => sum + share, 0);
  let sum = 0;
  for (let w = 0; w < shares.length; w++) {
    sum += shares[w];
    if (sum > value) return w;
  }
  return shares.findLastIndex((share) => share > 0);
}

// -- both -------------------------------------------------------------------------------------------------------------

export const freePlaces = (known) => [...known.keys()].filter((r) => known[r] === FREE);

// What stands, and the likeliest words elsewhere, with how sure each is.
function likeliest(stands, places, shares, vocabulary) {
  const ids = Int32Array.from(stands), confidence = new Float32Array(stands.length).fill(1);
  places.forEach((place, row) => {
    const own = shares.subarray(row * vocabulary, (row + 1) * vocabulary);
    let best = 0;
    for (let w = 1; w < vocabulary; w++) if (own[w] > own[best]) best = w;
    [ids[place], confidence[place]] = [best, own[best]];
  });
  return [ids, confidence];
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

// Piecewise linear through rising xs.
function interpolate(x, xs, ys) {
  const right = Math.min(xs.length - 1, Math.max(1, xs.findIndex((one) => one >= x)));
  return ys[right - 1] + ((x - xs[right - 1]) / (xs[right] - xs[right - 1])) * (ys[right] - ys[right - 1]);
}

// The normal quantile (Wichura, 1988, algorithm AS 241), of uniform numbers.
export function quantile(u) {
  const q = u - 0.5;
  const ratio = (x, above, below) => horner(x, above) / horner(x, [...below, 1]);
  if (Math.abs(q) <= 0.425) return q * ratio(0.180625 - q * q, A, B);
  const r = Math.sqrt(-Math.log(Math.min(u, 1 - u)));
  return Math.sign(q) * (r <= 5 ? ratio(r - 1.6, C, D) : ratio(r - 5, E, F));
}
const horner = (x, factors) => factors.reduce((sum, factor) => sum * x + factor, 0);
const A = [
  2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
  1971.5909503065514427, 133.14166789178437745, 3.387132872796366608,
];
const B = [
  5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
  687.1870074920579083, 42.313330701600911252,
];
const C = [
  7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
  3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734,
];
const D = [
  1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
  0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187,
];
const E = [
  2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
  0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772,
];
const F = [
  2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
  0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769,
];
