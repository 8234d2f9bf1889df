"""Conversations over HTTP: the chat template of the tokenizer makes the prompt."""

import json

import pytest
from models import make_model
from served import client_of, serving

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes, load_tokenizer

transformers = pytest.importorskip("transformers")
for package in ("jinja2", "starlette", "uvicorn"):
    pytest.importorskip(package)

TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}
{%- endif %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PARTS = [{"type": "text", "text": text} for text in ("A <|im_end|>", "b")]
MESSAGES = [{"role": "system", "content": "Say é."}, {"role": "user", "content": PARTS}]
SHOWN = (
    "<|im_start|>system\nSay é.<|im_end|>\n<|im_start|>user\nA <|im_end|>\nb<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({x: n for n, x in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    path = tmp_path_factory.mktemp("model") / "talks"
    tokenizer.save_pretrained(path)
    make_model(vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder, 258)


@pytest.fixture(scope="module")
def client(tokenizer):
    engine = Engine(
        make_model(vocab_size=258, eos_token_id=None), tokenizer, Limits(rows=3, new_tokens=50)
    )
    with client_of(engine) as client:
        yield client


def post(client, route="chat/completions", **body):
    return client.post(f"/v1/{route}", json={"messages": MESSAGES, "temperature": 0} | body)


def events_of(reply) -> list[dict]:
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_the_prompt_is_the_templates(client, tokenizer):
    """The reply is the completion of the conversation as its template writes it."""
    prompt = tokenizer.encode(SHOWN, add_special_tokens=False)
    assert prompt.count(tokenizer.eos_token_id) == 3  # in a message too, as the template reads it
    options = {"max_tokens": 20, "logit_bias": {str(tokenizer.eos_token_id): -100}}
    body = {"prompt": prompt, "temperature": 0, "logprobs": 2} | options
    (text,) = client.post("/v1/completions", json=body).json()["choices"]
    reply = post(client, **options, logprobs=True, top_logprobs=2).json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": text["text"], "refusal": None}
    assert choice["finish_reason"] == "length"
    shown = choice["logprobs"]["content"]
    assert [x["token"] for x in shown] == text["logprobs"]["tokens"]
    values = pytest.approx(text["logprobs"]["token_logprobs"], abs=1e-5)
    assert [x["logprob"] for x in shown] == values
    assert {len(x["top_logprobs"]) for x in shown} == {2}
    for x in shown:
        whole = not x["token"].startswith("token_id:")
        assert x["bytes"] == (list(x["token"].encode()) if whole else None)


def test_streams(client):
    options = {"max_completion_tokens": 20, "n": 2, "logprobs": True}
    reply = post(client, **options).json()
    events = events_of(post(client, **options, stream=True, stream_options={"include_usage": True}))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[-1]["usage"] == reply["usage"] | events[-1]["usage"]
    for choice in reply["choices"]:
        parts = [x for event in events for x in event["choices"] if x["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
            len(parts) - 1
        )
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        content = [x for part in parts for x in part["logprobs"]["content"]]
        assert [x["token"] for x in content] == [x["token"] for x in choice["logprobs"]["content"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_a_turn_ends(client, tokenizer):
    """At the tokenizer's end, which the model does not name; without one at the server's limit."""
    bias = {"logit_bias": {str(tokenizer.eos_token_id): 100}}
    (choice,) = post(client, **bias).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    reply = post(client, **bias, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 50
    assert reply["choices"][0]["finish_reason"] == "length"


def test_what_a_reply_has_may_be_sent_back(client):
    """All fields of its message; what says nothing is taken."""
    message = post(client, max_tokens=2).json()["choices"][0]["message"]
    more = {"tool_calls": None, "annotations": [], "audio": None}
    nothing = {"tools": [], "tool_choice": "none", "store": False, "top_logprobs": 0, "stop": ""}
    nothing |= {"response_format": {"type": "text"}, "frequency_penalty": 0, "logit_bias": None}
    reply = post(
        client, messages=[*MESSAGES, message | more, *MESSAGES[1:]], max_tokens=2, **nothing
    )
    assert reply.status_code == 200, reply.text


USER = {"role": "user", "content": "a"}
BAD = [
    ({"messages": []}, "expected at least one message, got none"),
    ({"messages": None}, "expected at least one message, got none"),
    ({"messages": "a"}, "expected messages to be a list of messages, got 'a'"),
    ({"messages": ["a"]}, "expected a message to be an object, got 'a'"),
    ({"messages": [USER | {"role": "tool"}]}, "role among system, user, assistant, got 'tool'"),
    ({"messages": [{"content": "a"}]}, "role among system, user, assistant, got None"),
    ({"messages": [{"role": "user"}]}, "content to be a string or a list of parts, got None"),
    ({"messages": [USER | {"content": 5}]}, "content to be a string or a list of parts, got 5"),
    ({"messages": [USER | {"content": "\ud800"}]}, "Unicode text, got lone surrogates"),
    ({"messages": [USER | {"weight": 1}]}, "message of role, content and name, got 'weight'"),
    (
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "expected parts of a message to be text, which is all the model reads, got 'image_url'",
    ),
    ({"messages": [USER, MESSAGES[0]]}, "that the chat template takes, got system comes first"),
    ({"top_logprobs": 2}, "expected logprobs to be true with top_logprobs = 2"),
    ({"logprobs": True, "top_logprobs": 21}, "expected top_logprobs from 0 to 20, got 21"),
    ({"logprobs": 1}, "expected logprobs to be true or false, got 1"),
    ({"tools": [{"type": "function"}]}, "expected tools to be [] or null, as it is not impl"),
    ({"n": 257}, "expected at most 256 choices, got 257"),
    ({"prompt": "a"}, "expected names among model"),
    ({"max_tokens": 51}, "expected at most 50 new tokens, got 51"),
]  # fmt: skip


def test_conversations_that_do_not_fit(client):
    for body, message in BAD:
        reply = client.post(
            "/v1/chat/completions", content=json.dumps({"messages": [USER]} | body).encode()
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        assert message in reply.json()["error"]["message"]
    assert post(client, model="gpt").status_code == 404


@pytest.mark.parametrize("tokenizer", [None, Bytes()])
def test_a_tokenizer_without_a_template(tokenizer):
    with client_of(Engine(make_model(vocab_size=256), tokenizer, Limits(rows=1))) as client:
        reply = post(client)
        assert reply.status_code == 400
        assert "expected a tokenizer with a chat template" in reply.json()["error"]["message"]
        reply = client.post("/v1/chat", json={})
    assert reply.status_code == 404
    paths = "/v1/completions, /v1/chat/completions, /v1/models, /v1/models/NAME, /health, "
    message = reply.json()["error"]["message"]
    assert message == f"expected a path among {paths}/metrics, /, got '/v1/chat'"


def test_bytes_with_a_template(tmp_path):
    """A folder of `make train` talks when a template is put beside."""
    train = pytest.importorskip("gla_ext.train.tokens.tokenizer")
    train.byte_tokenizer().save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path, 256), Bytes)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(tmp_path, 256).chat_template == TEMPLATE


@pytest.mark.slow
def test_openais_client(folder, tmp_path):
    openai = pytest.importorskip("openai")
    with serving(folder, tmp_path / "log") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            options = {"model": "talks", "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
            reply = client.chat.completions.create(**options)
            text = reply.choices[0].message.content
            turns = [*MESSAGES, reply.choices[0].message.model_dump(), MESSAGES[1]]
            assert client.chat.completions.create(**options | {"messages": turns}).usage
            stream = client.chat.completions.create(**options, stream=True)
            assert "".join(event.choices[0].delta.content for event in stream) == text
