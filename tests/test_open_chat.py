"""Somebody else's model behind HTTP: the studio's own API, and the `openai` package with chats."""

from collections.abc import Iterator
from typing import Any

import pytest
from open_checkpoints import CHAT, write_model, write_tokenizer
from serving import PATIENCE, Running, need, running

from difflm.generation.pipeline import TextDiffusion

openai = need("openai", "httpx2", "fastapi", "uvicorn")
MESSAGES = [{"role": "user", "content": "the dog"}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TextDiffusion:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", "llada")
    write_tokenizer(folder, template=CHAT)
    return TextDiffusion.from_pretrained(folder)


@pytest.fixture(scope="module")
def server(lm: TextDiffusion) -> Iterator[Running]:
    with running(lm) as found:
        yield found


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
