"""Denoise texts by edits: a tagger decides what is kept, replaced, deleted and inserted, and a generator writes the
words from left to right (Reid et al., 2022)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion import Condition, Noise, autocast_to, cross_entropy, require_source
from difflm.diffusion.processes.discrete import NUMBERS, draw_states
from difflm.diffusion.samplers.left_to_right import draw_by_inverse_cdf, truncate_logits
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.methods import levt as editing
from difflm.methods.diffuser.process import EditProcess
from difflm.methods.levt import DELETE, EDITS, IMPOSSIBLE, INSERT, KEEP, REPLACE
from difflm.models.base import Capabilities, Losses, Runner, Sampling, TextBatch, WordModel, source_of
from difflm.models.lengths import DrawnLength
from difflm.networks import EncoderDecoder, Transformer
from difflm.networks.cache import Memory, Slots
from difflm.networks.head import start_from_frequencies
from difflm.networks.rotary import compute_rotations
from difflm.runtime.delayed_flag import DelayedFlag

BANNED = (START, UNK, PAD)  # tokens that are never written; END ends a slot
MOST_ROWS = 1024  # partial texts that are searched at once
OTHER_STARTS = 0.3  # the share of training texts that do not start from noise
TIME, BAG, RUNS, WRITTEN = 35, 36, 37, 38  # random streams


@dataclass(frozen=True)
class Revision:
    """Some texts, [R, N] with START and END, and the edits that the tagger proposes."""

    text: Tensor
    edits: Tensor  # [R, N]
    stays: Tensor  # the probability that a word is neither replaced nor deleted, [R, N]
    log_p: Tensor  # of all edits of a text, [R]


class EditDiffusion(WordModel):
    """START words END on a canvas. A round of editing calls the tagger once, and the generator for each word of the new
    text, including the kept ones, since what it writes must follow them.

    The networks learn the fewest edits (`align`) from a corrupted text to the text itself, not to the text one step
    earlier: most of the noise was already there then, so the likeliest tag would keep it. Tags alone teach a tagger
    little, so in training it also predicts the correct word at each position."""

    def __init__(
        self,
        tagger: Transformer,
        generator: EncoderDecoder,
        process: EditProcess,
        lengths: DrawnLength,
        source_longest: int,
        shares_words: bool,
        sampling: Sampling,
    ) -> None:
        super().__init__()
        hidden, vocabulary = generator.input.in_features, process.vocabulary
        self.tagger, self.generator, self.process, self.lengths = tagger, generator, process, lengths
        self.embedding, self.tag_embedding = nn.Embedding(vocabulary, hidden), nn.Embedding(4, hidden)
        self.vocabulary, self.longest = vocabulary, lengths.longest
        self.slot, self.sampling, self.shares_words = vocabulary, sampling, shares_words
        self.capabilities = Capabilities(
            state="edits",
            step_rules=("edits", "ancestral"),
            settings=("any", "diffusion", "left-to-right", "tokens", "edits"),
            starts=("noise", "nothing", "source") if source_longest and shares_words else ("noise", "nothing"),
            source_limit=source_longest,
            greedy=True,
        )
        self.ban_tokens(BANNED)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        self.lengths.observe(lengths)
        tokens = tokens.clone()
        tokens[END] = lengths.sum()
        start_from_frequencies(self.generator.head.bias, tokens)

    # -- the two networks ---------------------------------------------------------------------------------------

    def encode_source(self, source: Tensor | None, mask: Tensor | None) -> list[Memory] | None:
        """Keys and values of sources for both networks; None for a model without sources."""
        if not self.capabilities.source_limit:
            return None
        source, mask = require_source(source, mask)
        with autocast_to(source.device, self.precision):
            # Shared words have the same vectors on both sides, so that words of the source can be found.
            words = self.embedding if self.shares_words else self.generator.embed_source
            return self.generator.split_memory(self.generator.encode_states(words(source), mask), mask)

    def read_text(self, text: Tensor, source: Sequence[Memory] | None) -> tuple[Tensor, Tensor]:
        """The tagger's states of texts [B, N], and logits of the edits at every position, [B, N, 4]. START may be kept
        or followed by an insertion; END is kept."""
        mask, network = text != PAD, self.tagger
        with autocast_to(text.device, self.precision):
            x, _ = network.run(network.embed(self.embedding(text), mask), None, mask, None, 0, memory=source)
            states = network.norm(x)
            logits = network.head(states).float()
        edit, starts = torch.arange(len(EDITS), device=text.device), (text == START).unsqueeze(-1)
        ends = (~mask | (text == END)).unsqueeze(-1)
        forbidden = (starts & (edit != KEEP) & (edit != INSERT)) | (ends & (edit != KEEP))
        return states, logits.masked_fill(forbidden, IMPOSSIBLE)

    def read_edited(self, text: Tensor, edits: Tensor, source: Sequence[Memory] | None) -> list[Memory]:
        """The generator's memory: the source, then the text with its edits, without deleted words."""
        stays = (text != PAD) & (edits != DELETE)
        text, edits = editing.keep_words(text, stays, PAD), editing.keep_words(edits, stays, KEEP)
        mask = text != PAD
        with autocast_to(text.device, self.precision):
            states = self.embedding(text) + self.tag_embedding(edits)
            own = self.generator.split_memory(self.generator.encode_states(states, mask), mask)
        if source is None:
            return own
        both = zip(source, own, strict=True)
        return [(torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2), torch.cat([a[2], b[2]], 3)) for a, b in both]

    def write_nats(
        self, text: Tensor, edits: Tensor, target: Tensor, found: Tensor, source: Sequence[Memory] | None
    ) -> tuple[Tensor, Tensor]:
        """−log p of each token that is written into the slots of texts, and their mask."""
        closed, written = editing.close_slots(target, target != PAD, found, END, PAD)
        memory, network = self.read_edited(text, edits, source), self.generator
        with autocast_to(text.device, self.precision):
            x, _ = network.run(network.input(self.embedding(closed[:, :-1])), None, None, None, 0, memory=memory)
            logits = network.answer(x).float()
        return cross_entropy(logits, closed[:, 1:]), written[:, 1:]

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        target, noise = editing.between_ends(batch), self.training_noise(batch)
        source = self.encode_source(*source_of(batch))
        text = self.corrupt(target, noise, batch)
        mask = text != PAD
        found = editing.align(text, mask, target, target != PAD)
        edits, stands_for = editing.name_edits(found)
        states, tags = self.read_text(text, source)
        with autocast_to(text.device, self.precision):
            guesses = self.generator.head(states).float()
        words, written = self.write_nats(text, edits, target, found, source)
        inner = editing.inner_words(text)
        with torch.autocast(target.device.type, enabled=False):
            guessed = cross_entropy(guesses, target.gather(1, stands_for))
            terms = {
                "tags": editing.masked_mean(cross_entropy(tags, edits.where(mask, KEEP)), mask & (text != END)),
                "words": editing.masked_mean(words, written),
                "guesses": editing.masked_mean(guessed, inner & ((edits == KEEP) | (edits == REPLACE))),
            }
            return editing.sum_means(terms, batch)

    def corrupt(self, target: Tensor, noise: Noise, batch: Batch) -> Tensor:
        """Training inputs: most texts are at a random time of the process; some are empty, some hold a few words of the
        text in random order, and some are the source."""
        t, kind = noise.uniform(0, 2, stream=TIME).unbind(1)
        noised = self.process.corrupt(target, self.process.draw_script(noise, target.shape[1]), t, noise)
        inner = editing.inner_words(target)
        order, chosen = noise.uniform(0, target.shape[1], 2, stream=BAG).unbind(2)
        taken = inner & (chosen < t.unsqueeze(1))
        shuffled = target.gather(1, torch.where(taken, order, 2.0).argsort(1))[:, :-2]
        starts = [(shuffled, taken.sum(1)), (shuffled, torch.zeros_like(batch.lengths))]
        if "source" in self.capabilities.starts and batch.source is not None and batch.source_lengths is not None:
            width = shuffled.shape[1]
            longer = F.pad(batch.source, (0, width), value=PAD)[:, :width]
            starts.append((longer, batch.source_lengths.clamp(max=width)))
        which = (kind / OTHER_STARTS * len(starts)).long()
        for k, (ids, lengths) in enumerate(starts):
            other = editing.between_ends(replace(batch, ids=ids, lengths=lengths))
            noised = torch.where((which == k).unsqueeze(1), other, noised)
        return noised

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """The nats of writing a text from nothing in one round. A text can be written in many ways, so this is not a
        likelihood, but it shows whether training helps."""
        target, source = editing.between_ends(batch), self.encode_source(*source_of(batch))
        empty = editing.between_ends(replace(batch, lengths=torch.zeros_like(batch.lengths)))
        found = editing.align(empty, empty != PAD, target, target != PAD)
        edits = torch.where(empty == START, INSERT, KEEP)
        nats, written = self.write_nats(empty, edits, target, found, source)
        return torch.where(written, nats, 0.0).sum(-1)

    # -- generation ---------------------------------------------------------------------------------------------

    def calls(self, sampling: Sampling, words: int) -> int:
        """An upper limit if texts do not shrink: the tagger's calls, and one for each word, END and end of a slot."""
        revisions, beams = count_beams(sampling)
        return revisions * (1 + sampling.steps * (1 + beams * (2 * words + 2)))

    def begin(self, noise: Noise, sampling: Sampling, steering: Steering) -> Tensor:
        """The texts that editing starts from, [B, N]."""
        device, start = noise.samples.device, "text" if steering.begin is not None else sampling.start
        ids = torch.full((len(noise.samples), self.longest), UNK, device=device)
        lengths = torch.zeros_like(noise.samples)
        given = {"text": steering.begin, "source": steering.source}.get(start)
        if given is not None:
            ids = F.pad(given, (0, self.longest), value=PAD)[:, : self.longest]
            lengths = (ids != PAD).sum(1)
        elif start == "noise":  # at the last time only the length of a text is left
            condition = Condition(source=steering.source, source_mask=steering.source_mask)
            lengths = self.lengths.draw(noise.uniform(0, stream=TIME), condition)
        text = editing.between_ends(Batch(ids, lengths))
        if start != "noise":
            return text
        script = self.process.draw_script(noise, text.shape[1])
        return self.process.corrupt(text, script, torch.ones(len(ids), device=device), noise)

    def plan_edits(
        self, text: Tensor, source: Sequence[Memory] | None, sampling: Sampling, noise: Noise, step: int
    ) -> Revision:
        _, logits = self.read_text(text, source)
        edit, unknown = torch.arange(len(EDITS), device=text.device), (text == UNK).unsqueeze(-1)
        p = logits.masked_fill(unknown & (edit != REPLACE) & (edit != DELETE), IMPOSSIBLE).softmax(-1)
        edits = p.argmax(-1)
        if sampling.sampler == "ancestral":
            fresh = noise.uniform(step, text.shape[1], NUMBERS).repeat_interleave(len(text) // len(noise.samples), 0)
            edits = draw_states(p, fresh)
        lost = ~(editing.inner_words(text) & (edits != DELETE)).any(1, keepdim=True)  # no text may be empty
        edits = torch.where(lost & (text == START), INSERT, edits)
        chosen = p.gather(-1, edits.unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(lost & (text == START), 1.0, chosen)
        log_p = chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log().sum(-1)
        return Revision(text, edits, p[..., KEEP] + p[..., INSERT], log_p)

    def write(self, batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        """Yield a frame for every round: the text after the round, and the edits of the next one. A text without
        further edits is finished. If there are several revisions, the likeliest is shown."""
        noise, lengths, sampling, steering = batch.noise, batch.lengths, batch.sampling, batch.steering
        revisions, beams = count_beams(sampling)

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(revisions, 0)

        source = self.encode_source(steering.source, steering.source_mask)
        if source is not None and revisions > 1:
            source = [(repeat(keys), repeat(values), repeat(mask)) for keys, values, mask in source]
        text = repeat(self.begin(noise, sampling, steering))
        scores = torch.zeros(len(lengths), revisions, device=lengths.device)
        scores[:, 1:] = IMPOSSIBLE  # at first all revisions are the same
        now = self.plan_edits(text, source, sampling, noise, 0)
        waiting, all_done = torch.ones_like(lengths, dtype=torch.bool), DelayedFlag()
        calls = torch.full_like(lengths, revisions)
        for step in range(sampling.steps):
            t, s = 1 - step / sampling.steps, 1 - (step + 1) / sampling.steps
            edits = now.edits
            if sampling.sampler == "ancestral":
                edits = self.delay_edits(edits, noise, step, t, s)
            plan = editing.open_slots(now.text, now.text != PAD, edits, self.slot, PAD)
            memory = self.read_edited(now.text, edits, source)
            made, fresh, log_p, used = self.fill_slots(plan, memory, noise, step, sampling, beams)
            log_p = (scores + now.log_p.view_as(scores)).unsqueeze(2) + log_p.view(*scores.shape, beams)
            made, fresh, best = keep_best(made, fresh, log_p.flatten(1), revisions)
            calls = calls + torch.where(waiting, revisions * (1 + beams * used.view_as(scores).amax(1)), 0)
            changes = repeat(waiting).unsqueeze(1)
            text = torch.where(changes, made, now.text)
            scores = torch.where(waiting.unsqueeze(1), best, scores)
            now = self.plan_edits(text, source, sampling, noise, step + 1)
            wanted = (now.edits != KEEP).any(1).view_as(scores) & (scores > IMPOSSIBLE)
            waiting = waiting & wanted.any(1)
            first = slice(None, None, revisions)
            edits = editing.fit_width(torch.where(waiting.unsqueeze(1), now.edits[first], KEEP) * (s > 0), batch.width)
            shown = text[first], now.stays[first], (fresh & changes)[first]
            yield editing.show_round(
                step, torch.full_like(scores[:, 0], s), *shown, batch.width, calls=calls, edits=edits
            )
            if all_done(~waiting.any()):
                return

    def delay_edits(self, edits: Tensor, noise: Noise, step: int, t: float, s: float) -> Tensor:
        """The edits that are made between t and s. A run of edits of one kind counts as one edit."""
        runs = F.pad(edits[:, 1:] != edits[:, :-1], (1, 0)).cumsum(1)
        u = noise.uniform(step, edits.shape[1], stream=RUNS).repeat_interleave(len(edits) // len(noise.samples), 0)
        return torch.where(u.gather(1, runs) < self.process.undone_share(t, s), edits, KEEP)

    def fill_slots(
        self, plan: Tensor, memory: list[Memory], noise: Noise, step: int, sampling: Sampling, beams: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fill the slots of plans [R, 2 N] from left to right, each in the likeliest ways or, without beams, in one:
        the texts [R · beams, N], the mask of written words, their log p [R, beams], and the calls, [R]."""
        u = noise.uniform(step, plan.shape[1], stream=WRITTEN)
        most = max(1, MOST_ROWS // beams) if sampling.beams else len(plan)
        found = []
        for part in (slice(k, k + most) for k in range(0, len(plan), most)):
            own = [(keys[part], values[part], mask[part]) for keys, values, mask in memory]
            found.append(self.write_texts(plan[part], own, u, sampling, beams))
        texts, fresh, log_p, used = (torch.cat(column) for column in zip(*found, strict=True))
        return texts, fresh, log_p, used

    def write_texts(
        self, plan: Tensor, memory: list[Memory], u: Tensor, sampling: Sampling, beams: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`fill_slots` of plans that are written at once; numbers `u` [R, 2 N] draw the words."""
        (rows, width), device = plan.shape, plan.device
        kept = ((plan != PAD) & (plan != self.slot)).sum(1, keepdim=True) - 2
        room = (self.longest - kept).expand(-1, beams)
        place = torch.ones_like(room)  # START has been read
        log_p = torch.zeros(rows, beams, device=device)
        log_p[:, 1:] = IMPOSSIBLE
        tokens = torch.full((rows, beams, width), PAD, device=device)
        tokens[..., 0] = START
        fresh, last = torch.zeros_like(tokens, dtype=torch.bool), tokens[..., :1]
        used, all_done = torch.zeros_like(kept[:, 0]), DelayedFlag()
        caches = self.open_caches(memory, rows * beams, width)
        turns = compute_rotations(width, self.generator.head_dim, device)
        positions, first = torch.arange(width, device=device), torch.arange(rows, device=device).unsqueeze(1) * beams
        for k in range(width - 1):
            logits = self.read_next(last.view(-1, 1), positions[k : k + 1], caches, turns, memory)
            item = plan.gather(1, place)
            opens = item == self.slot
            logits = self.allow_words(logits.unflatten(0, (rows, beams)), item, room, sampling)
            if sampling.beams:
                log_p, flat = (log_p.unsqueeze(2) + logits).flatten(1).topk(beams)
                parent, word = flat // self.vocabulary, flat % self.vocabulary
                place, room, item, opens = (part.gather(1, parent) for part in (place, room, item, opens))
                across = parent.unsqueeze(2).expand_as(tokens)
                tokens, fresh = tokens.gather(1, across), fresh.gather(1, across)
                for one in caches:
                    one.keys.copy_(one.keys.index_select(0, (first + parent).flatten()))
                    one.values.copy_(one.values.index_select(0, (first + parent).flatten()))
            else:
                word = draw_by_inverse_cdf(logits.exp(), u[:, k : k + 1]) if sampling.temperature else logits.argmax(-1)
                log_p = log_p + logits.gather(2, word.unsqueeze(2)).squeeze(2)
            writes = opens & (word != END)
            used = used + (item != PAD).any(1)
            tokens[..., k + 1], fresh[..., k + 1] = torch.where(opens & ~writes, self.slot, word), writes
            room, place = room - writes.long(), place + (~writes & (item != PAD)).long()
            last = word.unsqueeze(2)
            if all_done((item == PAD).all()):
                break
        tokens, fresh = tokens.flatten(0, 1), fresh.flatten(0, 1)
        stays = (tokens != PAD) & (tokens != self.slot)
        written = editing.keep_words(tokens, stays, PAD), editing.keep_words(fresh.long(), stays, 0).bool()
        text, new = (part[:, : self.longest + 2] for part in written)
        return text, new, log_p, used

    def open_caches(self, memory: list[Memory], texts: int, width: int) -> list[Slots]:
        """Empty caches of the generator's layers, in the dtype that autocast gives to keys and values."""
        keys, network = memory[0][0], self.generator
        empty = keys.new_zeros(len(memory), 2, texts, network.heads, width, network.head_dim)
        place = torch.zeros(1, dtype=torch.int64, device=keys.device)
        return [Slots(keys, values, place) for keys, values in empty]

    def allow_words(self, logits: Tensor, item: Tensor, room: Tensor, sampling: Sampling) -> Tensor:
        """Log p of the next words [R, beams, V]: in a slot those that there is room for, elsewhere the plan's `item`
        alone. A text is neither empty nor longer than its canvas."""
        ids, room, item = torch.arange(self.vocabulary, device=room.device), room.unsqueeze(2), item.unsqueeze(2)
        forbidden = self.banned | torch.where(room < 1, ids != END, (room == self.longest) & (ids == END))
        log_p = truncate_logits(logits.masked_fill(forbidden, IMPOSSIBLE), sampling).log_softmax(-1)
        return torch.where(item == self.slot, log_p, torch.where(ids == item, 0.0, IMPOSSIBLE))

    def read_next(
        self, last: Tensor, place: Tensor, caches: list[Slots], turns: tuple[Tensor, Tensor], memory: list[Memory]
    ) -> Tensor:
        """Logits after the last words [R, 1], which are at `place` [1]."""
        network, (cos, sin) = self.generator, turns
        caches[0].place.copy_(place)
        visible = (torch.arange(len(cos), device=last.device) <= place).view(1, 1, -1)
        with autocast_to(last.device, self.precision):
            turn = cos.index_select(0, place), sin.index_select(0, place)
            x, _ = network.run(network.input(self.embedding(last)), None, visible, caches, 0, turn, memory)
            return network.answer(x)[:, -1].float()


def count_beams(sampling: Sampling) -> tuple[int, int]:
    """The number of revisions of a text that are kept, and of ways to write each; 1 and 1 if words are drawn."""
    return (max(1, sampling.revisions), sampling.beams) if sampling.beams else (1, 1)


def keep_best(text: Tensor, fresh: Tensor, log_p: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the `count` likeliest of each text's candidates [B · C, N] with log p [B, C]: [B · count, N], the mask of
    words that were just written, and log p [B, count]. Of equal texts only the likeliest is kept."""
    if log_p.shape[1] == 1:
        return text, fresh, log_p
    log_p, order = log_p.sort(dim=1, descending=True, stable=True)
    across = order.unsqueeze(2).expand(-1, -1, text.shape[1])
    text, fresh = (part.unflatten(0, log_p.shape).gather(1, across) for part in (text, fresh))
    same = (text.unsqueeze(2) == text.unsqueeze(1)).all(3).tril(-1).any(2)
    log_p, best = log_p.masked_fill(same, IMPOSSIBLE).sort(dim=1, descending=True, stable=True)
    across = best[:, :count].unsqueeze(2).expand(-1, -1, text.shape[2])
    return text.gather(1, across).flatten(0, 1), fresh.gather(1, across).flatten(0, 1), log_p[:, :count]
