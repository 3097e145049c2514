// Texts to ids and back, as data/tokenizers.py and data/words.py have it, and the places of a text with gaps.
import { FREE } from "./sampling.js";

const SPECIALS = 4, UNK = 2;
const BLANK = /(?:_{3,}|\[MASK\]|<mask>)(?::(\d+))?/gi;
const MOST_GAP = 9_999;

// What cannot be done, as a sentence for the visitor.
export class Refused extends Error {}

// -- words ------------------------------------------------------------------------------------------------------------

const CJK = "\\u3040-\\u30ff\\u3400-\\u9fff\\uf900-\\ufaff\\u{20000}-\\u{3ffff}";
const W = `(?:[^\\s\\p{P}\\p{S}\\p{Cc}${CJK}]|_)`;
const inWord = new RegExp(`^${W}$`, "u");
const N = "\\p{Nd}";
const UNITS = "(?:lb|am|pm)";
const FUSED = ["that s", "there s", "ca nt", "wo nt", "i d", "can not"];
const CURRENCY = "£$€¥₹";
const fused = FUSED.map((pair) => {
  const [head, tail] = pair.split(" ");
  return `[${head[0]}${head[0].toUpperCase()}]${head.slice(1)}(?=${tail}(?!${W}))`;
});
const WORD = new RegExp([
  "\\n",
  `(?<!${W})(?:(?:[A-Z]\\.)+|(?:St|Mrs?|Ms|Dr|Jr|Prof|Inc|Ltd|vs|e\\.g|i\\.e|[ap]\\.m)\\.)(?!${W}|\\.)`,
  `['’](?:s|re|ll|d)(?!${W})`,
  `${N}+(?:[.,:]${N}+)*(?=${UNITS}(?!${W}))`,
  `(?<!${W})(?:${fused.join("|")})`,
  `(?<=${N})-(?=-${N})`,
  "--+|\\.\\.+",
  `[${CJK}]`,
  `(?:(?<!\\S)\\.|(?<!${W})-)?${W}+(?:(?:\\.(?=[a-z]|${N})|(?<=${N}|[A-Z])\\.|(?<=${N})[,:](?=${N})|&)${W}+)*`
    + `(?:-(?!-|[${CURRENCY}]|${W}))?`,
  "\\S",
].join("|"), "gu");
const OPENING = new Set("([{„‘「『（《"), CLOSING = new Set(",.;:!?)]}%”’…।،؛؟、。，！？；：」』）》");
const TIGHT = new Set(["/", "@", "—", "--"]), PAIRED = ["'", '"'];
const ENDING = /^['’](?:s|re|ll|d)$/, UNIT = new RegExp(`^${UNITS}$`), HAN = new RegExp(`^[${CJK}]`, "u");
const isDigit = (sign) => /^\p{Nd}$/u.test(sign), isLetter = (sign) => /^\p{L}$/u.test(sign);
const isAlnum = (sign) => /^[\p{L}\p{N}]$/u.test(sign);
const first = (word) => [...word][0] ?? "", last = (word) => [...word].at(-1) ?? "";

export function splitWords(text) {
  return (text.match(/\n|\S+/g) ?? []).flatMap((chunk) => chunk.match(WORD) ?? []);
}

export function joinWords(words) {
  return spaceWords(words).map((space, i) => (space ? " " : "") + words[i]).join("");
}

// Whether a space is written before each word.
export function spaceWords(words) {
  const spaces = [];
  for (const chunk of chunks(words)) {
    for (const piece of stablePieces(chunk)) spaces.push(spaces.length > 0, ...piece.slice(1).map(() => false));
  }
  return spaces.map((space, i) => space && words[i] !== "\n" && words[i - 1] !== "\n");
}

// Runs of words that are written without a space.
function* chunks(words) {
  const touching = words.slice(1).map((word, i) => touch(words[i], word));
  for (const i of quotesBefore(words)) {
    if (i > 0 && i < words.length && words[i - 1] !== "\n" && words[i] !== "\n") touching[i - 1] = true;
  }
  let begin = 0;
  for (let i = 1; i <= words.length; i++) {
    if (touching[i - 1]) continue;
    yield words.slice(begin, i);
    begin = i;
  }
}

function touch(left, right) {
  if (left === "\n" || right === "\n") return false;
  if (CLOSING.has(right) || right.startsWith("..") || ENDING.test(right) || OPENING.has(left)) return true;
  if (TIGHT.has(left) || TIGHT.has(right)) return true;
  if (CURRENCY.includes(left) || left === "–" || left === "#") return isDigit(first(right));
  if (right === "+" || right === "–" || UNIT.test(right)) return isDigit(last(left));
  if (right === "-") return isAlnum(last(left));
  if (left === "-") return isAlnum(first(right)) || CURRENCY.includes(right);
  if (HAN.test(right) && (HAN.test(left) || CLOSING.has(left))) return true;
  return FUSED.includes(`${left.slice(0, 1).toLowerCase()}${left.slice(1)} ${right}`);
}

// Positions that touch the word before them, by what quotation marks and apostrophes are.
function quotesBefore(words) {
  const before = new Set();
  const isApostrophe = (i) => {
    const left = words[i - 1] ?? "", right = words[i + 1] ?? "";
    if (words[i] === '"' || !isLetter(last(left)) || !isLetter(first(right))) return false;
    return ["t", "ve", "m"].includes(right) || (left.length === 1 && !"aAI".includes(left));
  };
  const places = (mark) => words.flatMap((word, i) => (word === mark ? [i] : []));
  for (const mark of PAIRED) {
    let marks = [];
    for (const i of places(mark)) isApostrophe(i) ? before.add(i).add(i + 1) : marks.push(i);
    while (marks.length) {
      const [i, partner] = marks;
      if (i > 0 && partner === undefined) before.add(i);
      else before.add(i + 1).add(partner ?? i + 1);
      marks = marks.slice(2);
    }
  }
  for (const i of places("’")) if (isApostrophe(i)) before.add(i + 1);
  for (const i of places("“")) before.add(words.includes("„") ? i : i + 1);
  return before;
}

// The chunk whole where it is read back as the same words; else its longest beginning that is, and so on.
function* stablePieces(chunk) {
  while (chunk.length) {
    let size = chunk.length;
    while (size > 1 && splitWords(chunk.slice(0, size).join("")).join("\0") !== chunk.slice(0, size).join("\0")) size--;
    yield chunk.slice(0, size);
    chunk = chunk.slice(size);
  }
}

class Words {
  unit = "words";

  constructor({ words }) {
    this.pieces = words.slice(SPECIALS);
    this.ids = new Map(this.pieces.map((word, i) => [word, i + SPECIALS]));
  }

  // Ids, and the words that have none by their place.
  encode(text) {
    const words = splitWords(text);
    const unknown = new Map([...words.entries()].filter(([, word]) => !this.ids.has(word)));
    return { ids: words.map((word) => this.ids.get(word) ?? UNK), unknown };
  }

  show(id) {
    return this.pieces[id - SPECIALS] ?? "";
  }

  spaces(tokens) {
    const spaces = spaceWords(tokens.filter(Boolean)).values();
    return tokens.map((token) => token !== "" && spaces.next().value);
  }

  join(tokens) {
    return joinWords(tokens).replace(/^\n+|\n+$/g, "");
  }
}

// -- byte pairs and characters ----------------------------------------------------------------------------------------

const BYTES = (() => { // the byte that each sign of the byte alphabet stands for
  const own = [...Array(256).keys()].filter((b) => (b > 32 && b < 127) || (b > 160 && b !== 173));
  const others = [...Array(256).keys()].filter((b) => !own.includes(b));
  return new Map([...own.map((b) => [String.fromCharCode(b), b]), ...others.map((b, k) => [String.fromCharCode(256 + k), b])]);
})();
const SIGNS = new Map([...BYTES].map(([sign, byte]) => [byte, sign]));
const PRETOKEN = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

class BytePairs {
  unit = "tokens";

  constructor({ pieces, merges }) {
    this.pieces = pieces;
    this.ids = new Map(pieces.map((piece, i) => [piece, i + SPECIALS]));
    this.ranks = new Map(merges.map((merge, rank) => [merge, rank]));
    this.shown = pieces.map((piece) => this.#spell(piece));
  }

  #spell(piece) {
    return new TextDecoder().decode(Uint8Array.from([...piece], (sign) => BYTES.get(sign)));
  }

  encode(text) {
    const words = text.match(PRETOKEN) ?? [];
    return { ids: words.flatMap((word) => this.#merge(word).map((piece) => this.ids.get(piece))), unknown: new Map() };
  }

  #merge(word) {
    let parts = Array.from(new TextEncoder().encode(word), (byte) => SIGNS.get(byte));
    for (;;) {
      const ranks = parts.slice(1).map((part, i) => this.ranks.get(`${parts[i]} ${part}`) ?? Infinity);
      const best = Math.min(Infinity, ...ranks);
      if (best === Infinity) return parts;
      const merged = [];
      for (let i = 0; i < parts.length; i++) merged.push(ranks[i] === best ? parts[i] + parts[++i] : parts[i]);
      parts = merged;
    }
  }

  show(id) {
    return this.shown[id - SPECIALS] ?? "";
  }

  spaces(tokens) {
    return tokens.map(() => false);
  }

  join(_, ids) {
    return this.#spell(Array.from(ids, (id) => this.pieces[id - SPECIALS] ?? "").join(""));
  }
}

class Characters {
  unit = "characters";

  constructor({ characters }) {
    this.pieces = this.shown = characters;
    this.ids = new Map(characters.map((one, i) => [one, i + SPECIALS]));
  }

  encode(text) {
    const missing = [...text].find((one) => !this.ids.has(one));
    if (missing !== undefined) throw new Refused(`This model has no character ${JSON.stringify(missing)}.`);
    return { ids: [...text].map((one) => this.ids.get(one)), unknown: new Map() };
  }

  show(id) {
    return this.pieces[id - SPECIALS] ?? "";
  }

  spaces(tokens) {
    return tokens.map(() => false);
  }

  join(tokens) {
    return tokens.join("");
  }
}

export function readTokenizer(data) {
  return new { words: Words, bpe: BytePairs, characters: Characters }[data.kind](data);
}

// -- gaps -------------------------------------------------------------------------------------------------------------

export class Template {
  constructor(text, tokenizer, most) {
    const parts = text.trim().split(BLANK);
    this.parts = parts.filter((_, i) => i % 2 === 0);
    this.sizes = parts.filter((_, i) => i % 2 === 1).map((n) => (n === undefined ? null : Math.min(MOST_GAP, Number(n))));
    if (!this.sizes.length) throw new Refused("Mark at least one gap with ___.");
    if (this.sizes.includes(0)) throw new Refused("A gap has at least one word; leave out ___:0.");
    if (this.parts.slice(1, -1).some((part) => !part.trim())) {
      throw new Refused("Two gaps touch; put a word between them or make them one.");
    }
    this.spells = tokenizer.unit !== "words";
    if (this.spells && this.sizes.some((size) => size !== null)) {
      throw new Refused("This model writes pieces of words: leave the size of the gap open (___).");
    }
    // The space before a gap is the gap's own where tokens have spaces.
    this.known = this.parts.map((part) => tokenizer.encode(this.spells ? part.replace(/ $/, "") : part));
    this.fewest = this.known.reduce((sum, { ids }) => sum + ids.length, 0) + this.sizes.reduce((sum, n) => sum + (n ?? 1), 0);
    if (this.fewest > most) throw new Refused(`The text has at least ${this.fewest} ${tokenizer.unit}; this model holds ${most}.`);
    this.tokenizer = tokenizer;
  }

  get isOpen() {
    return this.sizes.includes(null);
  }

  // Sizes of all gaps in a text of `length`: what is left for the free ones is cut at `shares`.
  cut(length, shares) {
    const rest = length - this.fewest, free = this.sizes.filter((size) => size === null).length;
    const cuts = [...shares].slice(0, Math.max(0, free - 1)).map((share) => Math.floor(share * (rest + 1)));
    const edges = [0, ...cuts.sort((a, b) => a - b), rest];
    let i = 0;
    return this.sizes.map((size) => size ?? 1 + edges[++i] - edges[i - 1]);
  }

  // The known ids with gaps of these sizes between them, words without an id by place, and where each gap begins.
  place(sizes) {
    const known = [], unknown = new Map(), begins = [];
    this.known.forEach(({ ids, unknown: own }, i) => {
      own.forEach((word, k) => unknown.set(known.length + k, word));
      known.push(...ids);
      begins.push(known.length);
      known.push(...Array(sizes[i] ?? 0).fill(FREE));
    });
    return { known: Int32Array.from(known), unknown, begins: begins.slice(0, -1) };
  }

  // Ids that may not stand at a place: the first or the last one of a gap.
  banned(begins, sizes) {
    this.misfits ??= this.spells ? this.#misfitPieces() : this.#misfitWords();
    const banned = new Map(), ban = (place, ids) => banned.set(place, [...(banned.get(place) ?? []), ...ids]);
    begins.forEach((place, i) => {
      ban(place, this.misfits[i].first);
      ban(place + sizes[i] - 1, this.misfits[i].last);
    });
    return (place) => banned.get(place) ?? [];
  }

  // A gap behind a space begins with one, and none ends with white space.
  #misfitPieces() {
    const { shown } = this.tokenizer, last = findIds(shown, (piece) => /\s$/.test(piece));
    const glued = findIds(shown, (piece) => !piece.startsWith(" "));
    return this.sizes.map((_, i) => ({ first: this.parts[i].endsWith(" ") ? glued : [], last }));
  }

  // A gap apart from the words around it has no mark there that is written without a space.
  #misfitWords() {
    const { pieces } = this.tokenizer;
    return this.sizes.map((_, i) => {
      const before = /\s$/.test(this.parts[i]) ? splitWords(this.parts[i]).at(-1) : undefined;
      const [after] = /^\s/.test(this.parts[i + 1]) ? splitWords(this.parts[i + 1]) : [];
      return {
        first: findIds(pieces, (word) => before && !inWord.test(first(word)) && touch(before, word)),
        last: findIds(pieces, (word) => after && !inWord.test(last(word)) && touch(word, after)),
      };
    });
  }
}

function findIds(pieces, test) {
  return pieces.flatMap((piece, i) => (test(piece) ? [i + SPECIALS] : []));
}
