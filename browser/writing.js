// A request becomes a text: its length and the sizes of its gaps are drawn as difflm draws them, and every step is shown.
import { FREE, believeMasks, denoise } from "./sampling.js";
import { Refused, Template } from "./texts.js";

const LENGTH = 1, GAPS = 4; // streams of random numbers
const MOST_PIECES = 8, OTHERS = 3, SHARPNESS = 4; // sizes that a gap is tried with (controls/gap_sizes.py)

// Frames for the player, and at last the text itself: {frame} … {text, unknown}.
export function* write(model, tokenizer, { template, length, seed, steps }) {
  const { longest, learned_gaps } = model.config;
  if (length !== null && !(length >= 1 && length <= longest)) {
    throw new Refused(`The length must be between 1 and ${longest} ${tokenizer.unit}.`);
  }
  let place = { known: null, unknown: new Map() }, banned = () => [], gaps = {};
  if (template.trim() === "") {
    place.known = new Int32Array(length ?? drawLength(model, seed, 1)).fill(FREE);
  } else {
    const asked = new Template(template, tokenizer, longest);
    if (length !== null && (length < asked.fewest || (length > asked.fewest && !asked.isOpen))) {
      const least = asked.isOpen ? "at least " : "";
      throw new Refused(`The text has ${least}${asked.fewest} ${tokenizer.unit}: give another length, or none.`);
    }
    const between = length === null && asked.parts.at(-1) !== ""; // nothing is asked but gaps between words
    if (between) gaps = model.config.gaps;
    const total = length ?? (asked.isOpen ? drawLength(model, seed, asked.fewest) : asked.fewest);
    const shares = Float32Array.from(model.uniform(seed, GAPS, 0, asked.sizes.length, 0));
    const sizes = between && learned_gaps ? chooseSizes(model, asked, shares) : asked.cut(total, shares);
    place = asked.place(sizes);
    banned = asked.banned(place.begins, sizes);
  }
  let before = null;
  for (const { step, t, ids, confidence, last } of denoise(model, { seed, steps, known: place.known, banned, gaps })) {
    const tokens = Array.from(ids, (id, k) => place.unknown.get(k) ?? tokenizer.show(id));
    const changed = Array.from(ids, (id, k) => before !== null && before[k] !== id);
    before = ids;
    yield {
      frame: { step, t, tokens, spaces: tokenizer.spaces(tokens), confidence: [...confidence], changed },
      ...(last && { text: tokenizer.join(tokens.filter(Boolean), ids), unknown: [...place.unknown.values()] }),
    };
  }
}

// By the histogram of the training texts, from `low` on (models/lengths.py, DrawnLength).
function drawLength(model, seed, low) {
  const [u] = model.uniform(seed, LENGTH, 0, 0, 0), smoothed = model.config.lengths.slice(low - 1);
  const observed = smoothed.map((count) => count - 1), sum = (counts) => counts.reduce((all, one) => all + one, 0);
  const counts = sum(observed) > 0 ? observed : smoothed, all = sum(counts);
  let passed = 0;
  const found = counts.findIndex((count) => (passed += count) / all >= u);
  return low + (found < 0 ? counts.length - 1 : found);
}

// A size for each gap, by how sure the model is of what it would write there (controls/gap_sizes.py).
function chooseSizes(model, asked, shares) {
  const given = asked.known.reduce((sum, { ids }) => sum + ids.length, 0), count = asked.sizes.length;
  const most = Math.max(1, Math.min(MOST_PIECES, Math.floor((model.config.longest - given) / count)));
  return asked.sizes.map((_, gap) => {
    const scores = Array.from({ length: most }, (_, n) => {
      return scoreGap(model, asked, asked.sizes.map((_, i) => (i === gap ? n + 1 : Math.min(OTHERS, most))), gap);
    });
    const top = Math.max(...scores), own = scores.map((score) => Math.exp(SHARPNESS * (score - top)));
    const value = shares[gap] * own.reduce((all, one) => all + one, 0);
    let passed = 0;
    return 1 + Math.max(0, own.findIndex((one) => (passed += one) >= value));
  });
}

// The mean log-probability of what is written into one gap, while the surest half of all masks is written at a time.
function scoreGap(model, asked, sizes, gap) {
  const { known, begins } = asked.place(sizes), banned = asked.banned(begins, sizes), { vocabulary } = model.config;
  const x = Int32Array.from(known, (id) => (id === FREE ? vocabulary : id));
  let total = 0;
  while (x.includes(vocabulary)) {
    const [shares, places] = believeMasks(model, x, banned, 1);
    const best = places.map((place, row) => {
      const own = shares.subarray(row * vocabulary, (row + 1) * vocabulary);
      const share = own.reduce((most, one) => Math.max(most, one), 0);
      return { place, word: own.indexOf(share), sure: Math.log(share) };
    });
    best.sort((a, b) => b.sure - a.sure);
    for (const { place, word, sure } of best.slice(0, Math.ceil(best.length / 2))) {
      x[place] = word;
      if (place >= begins[gap] && place < begins[gap] + sizes[gap]) total += sure;
    }
  }
  return total / sizes[gap];
}
