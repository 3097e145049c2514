"""Levenshtein Transformer (Gu et al., 2019): words are deleted and inserted in parallel until nothing changes.

One decoder serves all three questions, as in the released code. Texts to learn insertions from are references of which
words are deleted at random, texts to learn deletions from are filled by the model, with its likeliest words; the edits
to imitate are the fewest. There is no distillation from a left-to-right model. A gap may take as many words as the
longest text has.
"""

from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.levt.model import LevenshteinModel
from difflm.methods.parts import build_reader
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import EncoderDecoder


class LevT(ReadsSources):
    name, task = "levt", "seq2seq"

    hidden: int = 384
    heads: int = 6

    def build(self, texts: TextSpec) -> LanguageModel:
        places = texts.longest + 2
        dims = self.hidden, texts.vocabulary
        network, _ = build_reader(EncoderDecoder, self, texts, *dims, time="none", positions=places)
        sampling = Sampling("edits", steps=10, temperature=0.0)
        return LevenshteinModel(network, texts.vocabulary, texts.longest, texts.source_longest, sampling)
