"""DiffusER: Diffusion via Edit-based Reconstruction (Reid, Hellendoorn & Neubig, 2022). A tagger says which words are
kept, replaced, deleted and inserted, and a generator writes the new ones from left to right.

The released repository holds no code. Our choices: the corruption draws a text at any time at once, and its edits are
not edited again (process.py); the edits to learn are the fewest that lead to the text itself; a tag
of START or of a word also says that words come behind it, and words next to each other that are replaced are replaced
together, by any number of words. Edits are those of tokens. Of a source both networks read the same states. The paper's
start from another model's text is --edit TEXT."""

from pydantic import Field

from difflm.data.tokenizers import END, PAD, SPECIALS
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.diffuser.model import EditDiffusion
from difflm.methods.diffuser.process import EditProcess
from difflm.methods.levt import EDITS
from difflm.methods.parts import build_lengths, read_sizes
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import EncoderDecoder, SourceSizes, Transformer


class DiffusER(ReadsSources):
    name, task = "diffuser", "either"

    dropout: float = 0.3
    span: float = Field(default=3.0, ge=0, le=20)
    "The mean number of words of an edit; 8 for summaries in the paper."

    def build(self, texts: TextSpec) -> LanguageModel:
        width, reads_source = texts.longest + 2, texts.source_longest > 0
        sizes = read_sizes(self)
        tagger = Transformer(self.hidden, len(EDITS), sizes, time="none", positions=width, reads_source=reads_source)
        source = SourceSizes(
            texts.source_vocabulary or 1,  # words that are shared have the vectors of the texts
            max(texts.source_longest, width),  # the encoder reads the edited text, too
            self.encoder_layers,
        )
        generator = EncoderDecoder(self.hidden, texts.vocabulary, sizes, source, time="none", causal=True)
        process = EditProcess(len(SPECIALS), texts.vocabulary, END, PAD, self.span)
        lengths = build_lengths(texts, self.hidden, "drawn")
        sampling = Sampling("edits", steps=12, temperature=0.0 if reads_source else 1.0, start="nothing")
        shares_words = not texts.source_vocabulary
        return EditDiffusion(tagger, generator, process, lengths, texts.source_longest, shares_words, sampling)
