"""The `openai` package talks to the studio as to any other server."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from difflm.controls import Infill
from difflm.data.words import split_words
from difflm.generation.pipeline import TextDiffusion
from difflm.player.frames import Draft
from tests.support.serving import Running, need, running
from tests.support.tiny import tiny_run

openai = need("openai", "fastapi", "uvicorn")

STEPS = {"controls": {"steps": 4}}


@pytest.fixture(scope="module")
def server(tiny_runs: dict[str, Path]) -> Iterator[Running]:
    with running(TextDiffusion.from_pretrained(tiny_runs["difflm"]), token="secret") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def complete(client: Any, prompt: Any, **asked: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **{"seed": 1, "extra_body": STEPS, **asked})


def test_it_lists_the_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "difflm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_it_continues_a_prompt(client: Any) -> None:
    made = complete(client, "The old pub", n=3)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for choice in made.choices:
        assert choice.text[0] == " " and choice.finish_reason == "stop"
        assert split_words("The old pub" + choice.text)[:3] == ["The", "old", "pub"]
    words = sum(len(split_words(choice.text)) for choice in made.choices)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, words)
    assert [c.text for c in complete(client, "The old pub", n=3).choices] == [c.text for c in made.choices]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_words_than_asked(client: Any, most: int) -> None:
    for prompt in ("", "The old", ["One", "A small"]):
        for choice in complete(client, prompt, n=4, max_tokens=most).choices:
            assert 1 <= len(split_words(choice.text)) <= most


def test_it_fills_what_stands_between_prompt_and_suffix(client: Any) -> None:
    for before, after in (("The old", "is cheap."), ("The old ", " is cheap."), ("", "is cheap."), ("The", " .")):
        (choice,) = complete(client, before, suffix=after, max_tokens=4).choices
        assert 1 <= len(split_words(choice.text)) <= 4
        assert choice.controls[0]["satisfied"]
        whole = before + choice.text + after
        assert split_words(whole) == [*split_words(before), *split_words(choice.text), *split_words(after)]
        assert "  " not in whole


def test_it_fills_gaps_and_obeys_controls(client: Any) -> None:
    body = {"infill": "The ___:2 pub ___ .", "controls": {"steps": 4, "contains": ["river"], "avoid": ["near"]}}
    for prompt in ("", None):
        (choice,) = complete(client, prompt, extra_body=body).choices
        words = split_words(choice.text)
        assert words[0] == "The" and words[3] == "pub" and "river" in words and "near" not in words
        assert [control["satisfied"] for control in choice.controls] == [True, True, True]


def test_a_stream_holds_the_same_choices(client: Any) -> None:
    whole = complete(client, ["The", ""], n=2)
    chunks = list(complete(client, ["The", ""], n=2, stream=True, stream_options={"include_usage": True}))
    found = {choice.index: choice.text for chunk in chunks for choice in chunk.choices}
    assert found == {choice.index: choice.text for choice in whole.choices}
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_a_choice_ends_before_a_stop_and_repeats_its_prompt(client: Any) -> None:
    (plain,) = complete(client, "The old").choices
    (echoed,) = complete(client, "The old", echo=True).choices
    assert echoed.text == "The old" + plain.text
    word = split_words(plain.text)[2]
    (stopped,) = complete(client, "The old", stop=[word, "no such word"]).choices
    assert stopped.text == plain.text[: plain.text.index(word)]


def test_temperature_zero_is_not_refused(client: Any) -> None:
    assert complete(client, "The", temperature=0).choices[0].text


def test_without_a_seed_texts_differ_and_the_seed_is_told(client: Any) -> None:
    one, other = (client.completions.create(model="tiny", prompt="", extra_body=STEPS) for _ in range(2))
    assert one.seed != other.seed
    assert complete(client, "", seed=one.seed).choices[0].text == one.choices[0].text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": "a ___ b"}, "infill"),
        ({"prompt": "x", "top_p": 0.5}, "top_p has no effect"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": ["x", "y"], "logprobs": 0}, "one prompt"),
        ({"prompt": "x", "n": 2, "best_of": 3}, "multiple of n"),
        ({"prompt": "x", "best_of": 9}, "candidates must be at most 8"),
        ({"prompt": "x", "best_of": 2, "extra_body": {"controls": {"mbr": 2}}}, "say the same"),
        ({"prompt": "x", "n": 17}, "n must be at most 16"),
        ({"prompt": ["x"] * 9, "n": 4}, "32 texts"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x", "extra_body": {"infill": "The ___"}}, "two ways"),
        ({"prompt": "x", "extra_body": {"controls": {"seed": 3}}}, "a key of the request itself"),
        ({"prompt": "x", "extra_body": {"controls": {"length": 99}}}, "between 1 and 24"),
        ({"prompt": "word " * 30}, "at least 31 tokens"),
    ],
)
def test_what_is_wrong_is_said(client: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=said):
        client.completions.create(model="tiny", **asked)


def test_an_answer_follows_a_regular_expression(client: Any) -> None:
    body = {**STEPS, "response_format": {"type": "regex", "regex": r"\w+ (near|beside) .* food"}}
    for prompt, suffix in (("", None), ("The old", None), ("The  old ", "."), (["A", "One small"], None)):
        for choice in complete(client, prompt, suffix=suffix, n=2, extra_body=body).choices:
            assert re.fullmatch(r"\w+ (near|beside) .* food", choice.text), choice.text
            assert all(control["satisfied"] for control in choice.controls)
    short = complete(client, "The", max_tokens=6, extra_body=body).choices[0]
    assert len(split_words(short.text)) <= 6 and re.fullmatch(r"\w+ (near|beside) .* food", short.text)
    plain = complete(client, "The", extra_body={**STEPS, "response_format": {"type": "text"}}).choices[0]
    assert plain.text == complete(client, "The").choices[0].text


@pytest.mark.parametrize(
    "regex",
    [
        "(a+)+$",
        "((a?){1000}){1000}",
        "(a|b)*a(a|b){12}",
        "(" * 500,
        "zebra",
        "[^\\s\\S]",
        "x{999}",
    ],
)
def test_a_hostile_expression_is_refused_at_once(client: Any, regex: str) -> None:
    begun = time.process_time()  # of client and server: others may keep this machine busy
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, "", extra_body={"response_format": {"type": "regex", "regex": regex}})
    assert time.process_time() - begun < 10 and "\n" not in refused.value.body["message"]


DEEP: Any = {"type": "null"}
for _ in range(600):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "json_object"}, "no text of this model"),
        ({"type": "json_object", "regex": "x"}, "takes no other"),
        ({"type": "regex"}, "needs the key 'regex'"),
        ({"type": "text", "regex": "x"}, "takes no other"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "the type is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, "no text of this model"),
        ({"type": "json_schema", "json_schema": {"schema": DEEP}}, "."),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(client: Any, form: Any, said: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError), match=said):
        complete(client, "", extra_body={"response_format": form})


@pytest.mark.parametrize("depth", [50, 300, 900, 5000])
def test_schemas_without_end_are_refused(client: Any, depth: int) -> None:
    body = '{"type": "array", "items": ' * depth + '{"type": "null"}' + "}" * depth
    for form in (
        '{"controls": {"json_schema": %s}}',
        '{"response_format": {"type": "json_schema", "json_schema": {"schema": %s}}}',
    ):
        answer = client._client.post(
            f"{client.base_url}completions",
            content=form % body,
            headers={"content-type": "application/json", "authorization": "Bearer secret"},
        )
        assert answer.status_code in (400, 413, 422), answer.text[:200]


def test_log_probabilities_are_those_of_the_answer(client: Any) -> None:
    for prompt, suffix in (("", None), ("The old", "food.")):
        for choice in complete(client, prompt, suffix=suffix, n=2, logprobs=0).choices:
            told, answer = choice.logprobs, choice.text.strip()
            assert "".join(told.tokens).strip() == answer and len(told.tokens) == len(split_words(answer))
            assert all(-21 < nats <= 0 for nats in told.token_logprobs)
            offsets = zip(told.tokens, told.text_offset, strict=True)
            assert all(choice.text.startswith(token, at) for token, at in offsets)
            assert told.top_logprobs is None
    assert complete(client, "").choices[0].logprobs is None


def test_likely_tokens_are_those_that_the_model_believes_in(client: Any, tiny_runs: dict[str, Path]) -> None:
    """Each given all others of the text, as `TextDiffusion.alternatives` says."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    for prompts in ("", ["The old", "A small"]):
        for k, choice in enumerate(complete(client, prompts, n=2, logprobs=3).choices):
            told, prompt = choice.logprobs, prompts[k // 2] if prompts else ""
            beliefs = lm.alternatives(prompt + choice.text, k=3)[len(split_words(prompt)) :]
            assert "".join(told.tokens).strip() == choice.text.strip() and len(told.tokens) == len(beliefs)
            for token, nats, top, belief in zip(
                told.tokens, told.token_logprobs, told.top_logprobs, beliefs, strict=True
            ):
                assert token.strip() == belief.token
                assert nats == pytest.approx(math.log(max(belief.probability, 1e-9)), abs=1e-3)
                assert [other.strip() for other in top] == [*belief.alternatives] and len(top) == 3
                assert [*top.values()] == pytest.approx([math.log(p) for p in belief.alternatives.values()], abs=1e-3)
                assert all(other.startswith(" ") == token.startswith(" ") for other in top)


def test_the_best_of_several_candidates_is_the_one_that_candidates_keeps(
    client: Any, tiny_runs: dict[str, Path]
) -> None:
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    best = complete(client, "", n=2, best_of=6)
    assert [c.text for c in best.choices] == [*map(str, lm.generate(2, 1, candidates=3, rank="bound", steps=4))]
    (choice,) = complete(client, "The old", best_of=4, logprobs=2).choices
    (made,) = lm.generate(1, 1, controls=[Infill("The old ___")], candidates=4, steps=4)
    assert "The old" + choice.text == made.text and len(choice.logprobs.tokens) == len(split_words(choice.text))
    streamed = [*complete(client, "", n=2, best_of=6, logprobs=1, stream=True)]
    assert {c.text for chunk in streamed for c in chunk.choices} == {c.text for c in best.choices}
    assert all(len(c.logprobs.top_logprobs[0]) == 1 for chunk in streamed for c in chunk.choices)


def test_log_probabilities_are_not_those_of_the_same_words_in_the_prompt() -> None:
    """Words that were given are certain; the same words in the answer are not."""
    from difflm.app.studio.completions import log_probabilities, read_drafts

    tokens = ["He", "stopped", ".", "He", "stopped", "."]
    drafts = [Draft(0, 1, 0.5, ["He", "stopped", ".", "He", "", ""], [1.0] * 4 + [0.0] * 2, [True] * 6)]
    drafts.append(Draft(0, 2, 0.0, tokens, [1.0, 1.0, 1.0, 1.0, 0.5, 0.25], [False] * 4 + [True] * 2))
    found = log_probabilities(read_drafts(drafts), "He stopped. He stopped.", " stopped.", len("He stopped. He"))
    assert found["tokens"] == [" stopped", "."] and found["text_offset"] == [0, 8]
    assert found["token_logprobs"] == [round(math.log(0.5), 4), round(math.log(0.25), 4)]


@pytest.mark.long
def test_a_client_gets_json_of_its_schema_a_hundred_times(tmp_path: Path) -> None:
    """From an untrained model of characters, which knows nothing of JSON."""
    (tmp_path / "signs.txt").write_text("".join(f'{chr(k)}{{}}[]": {chr(159 - k)}\n' for k in range(33, 127)) * 4)
    changes = {"steps": 1, "validate_every": 1, "save_every": 1, "tokenizer": "characters", "longest": 80}
    run = tiny_run(tmp_path, "mdlm", data=str(tmp_path / "signs.txt"), **changes)
    item = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "items": {"type": "array", "items": item}},
        "required": ["name", "items"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "menu", "schema": schema, "strict": True}}
    body = {"controls": {"steps": 1}, "response_format": form}
    with running(TextDiffusion.from_pretrained(run)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        free = {**body, "response_format": {"type": "json_object"}}
        for seed in range(10):
            (choice,) = client.completions.create(model="tiny", prompt="", seed=seed, extra_body=free).choices
            assert isinstance(json.loads(choice.text), dict)
        for seed in range(100):
            (choice,) = client.completions.create(model="tiny", prompt="", seed=seed, extra_body=body).choices
            jsonschema_rs.validate(schema, json.loads(choice.text))


@pytest.mark.long
def test_the_benchmark_counts_answers_of_pieces_that_are_valid(tmp_path: Path) -> None:
    benchmark = pytest.importorskip("benchmarks.speed.serving", reason="run from the repository's root")
    (tmp_path / "signs.txt").write_text("".join(f'{chr(k)}{{}}[]": {chr(159 - k)}\n' for k in range(33, 127)) * 4)
    changes = {"steps": 1, "validate_every": 1, "save_every": 1, "tokenizer": "bpe", "vocabulary": 300, "longest": 80}
    run = tiny_run(tmp_path, "mdlm", data=str(tmp_path / "signs.txt"), **changes)
    found = benchmark.report_json(str(run), 2, 10, "cpu")
    assert found["valid"] == "10 of 10" and not found["wrong"]
    assert found["hostile_refused"] == f"{len(benchmark.HOSTILE)} of {len(benchmark.HOSTILE)}"


def test_another_model_and_another_token_are_refused(client: Any, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="/etc/passwd", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_an_autoregressive_model_writes_free_texts_of_the_length_asked(tiny_runs: dict[str, Path]) -> None:
    lm = TextDiffusion.from_pretrained(tiny_runs["autoregressive"])
    with running(lm) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        (choice,) = client.completions.create(model="tiny", prompt="", seed=0, max_tokens=3).choices
        assert len(split_words(choice.text)) == 3 and choice.finish_reason == "length"
        with pytest.raises(openai.UnprocessableEntityError, match="diffusion models"):
            client.completions.create(model="tiny", prompt="The")
        assert client.completions.create(model="tiny", prompt="", seed=0, logprobs=0).choices[0].logprobs.tokens
        with pytest.raises(openai.UnprocessableEntityError, match="does not see all other words"):
            client.completions.create(model="tiny", prompt="", logprobs=2)
