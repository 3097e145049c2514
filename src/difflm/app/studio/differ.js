// For each of `words` whether `base`, a list of words too, lacks it there (longest common subsequence).
export function lacking(base, words) {
  const best = Array.from({ length: base.length + 1 }, () => new Array(words.length + 1).fill(0));
  for (let i = base.length - 1; i >= 0; i--) {
    for (let j = words.length - 1; j >= 0; j--) {
      best[i][j] = base[i] === words[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
  }
  let i = 0;
  return words.map((word, j) => {
    while (i < base.length && base[i] !== word && best[i + 1][j] >= best[i][j + 1]) i += 1;
    if (base[i] !== word) return true;
    i += 1;
    return false;
  });
}
