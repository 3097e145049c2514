"""Somebody else's model behind HTTP: the studio's own API, and the `openai` package with chats."""

from statistics import mean
from typing import Any

import pytest

from difflm.generation.pipeline import TextDiffusion
from tests.support.open_checkpoints import CHAT, write_model, write_tokenizer
from tests.support.serving import PATIENCE, Running, need

openai = need("openai", "httpx2", "fastapi", "uvicorn")
MESSAGES = [{"role": "user", "content": "the dog"}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TextDiffusion:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", "llada")
    write_tokenizer(folder, template=CHAT)
    return TextDiffusion.from_pretrained(folder)


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def chat(client: Any, **asked: Any) -> Any:
    body = {"seed": 1, "max_tokens": 12, "extra_body": {"controls": {"steps": 4, "contains": ["cat"]}}, **asked}
    return client.chat.completions.create(model="tiny", messages=body.pop("messages", MESSAGES), **body)


@pytest.mark.long
def test_a_gap_two_words_and_a_length_by_http(server: Running, lm: TextDiffusion) -> None:
    import httpx2 as httpx

    asked = {"infill": "my dog ___ in the garden", "contains": ["old cat", "house"], "length": 24, "steps": 4}
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        (made,) = http.post("/api/generate", json=asked).json()["texts"]
        assert all(check["satisfied"] for check in made["controls"]) and len(lm.tokenizer.encode(made["text"])) == 24
        assert http.get("/api/controls").json()["length"] == {"most": 63, "unit": "tokens"}
        page = http.post("/api/player", json={"request": asked})
        assert page.status_code == 200 and "old cat" in page.text
        refused = http.post("/v1/chat/completions", json={"messages": [{"role": "oracle", "content": "a"}]})
        assert refused.status_code == 422 and "\n" not in refused.json()["error"]["message"]


@pytest.mark.long
def test_it_answers_messages(client: Any, lm: TextDiffusion) -> None:
    made = chat(client, n=2)
    assert [choice.message.role for choice in made.choices] == ["assistant"] * 2
    assert all(" cat" in choice.message.content for choice in made.choices)
    assert all(len(lm.tokenizer.encode(choice.message.content)) <= 12 for choice in made.choices)
    other = chat(client, messages=[*MESSAGES, {"role": "assistant", "content": "a cat"}, *MESSAGES])
    assert other.choices[0].message.content != made.choices[0].message.content
    pieces = [piece for piece in chat(client, stream=True) if piece.choices]
    assert [piece.choices[0].delta.content for piece in pieces] == [chat(client).choices[0].message.content]
    with pytest.raises(openai.UnprocessableEntityError, match="which the chat template uses itself"):
        chat(client, messages=[{"role": "user", "content": "a <|eot_id|>"}])


@pytest.mark.long
def test_an_answer_comes_with_the_tokens_that_are_likely_in_its_places(client: Any, lm: TextDiffusion) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    told, (plain,) = choice.logprobs.content, chat(client, logprobs=True).choices
    assert plain.message.content == choice.message.content and not plain.logprobs.content[0].top_logprobs
    assert "".join(one.token for one in told).strip() == choice.message.content.strip()
    for one in told:
        assert bytes(one.bytes).decode() == one.token and one.logprob <= 0 and len(one.top_logprobs) == 3
        likely = [other.logprob for other in one.top_logprobs]
        assert likely == sorted(likely, reverse=True) and one.logprob <= likely[0] + 1e-4
    (streamed,) = [piece.choices[0] for piece in chat(client, logprobs=True, top_logprobs=3, stream=True)]
    assert streamed.logprobs.content == told
    with pytest.raises(openai.UnprocessableEntityError, match="top_logprobs needs logprobs"):
        chat(client, top_logprobs=3)


@pytest.mark.long
def test_the_best_of_several_answers_is_the_one_whose_tokens_fit_best(client: Any, lm: TextDiffusion) -> None:
    """Each token given all others and the messages."""
    controls = {"steps": 4, "contains": ["cat"]}
    (best,) = chat(client, temperature=1, extra_body={"best_of": 4, "controls": controls}).choices
    every = chat(client, n=4, temperature=1, logprobs=True, top_logprobs=1).choices
    means = [mean(one.logprob for one in choice.logprobs.content) for choice in every]
    assert best.message.content == every[means.index(max(means))].message.content and len({*means}) == 4
