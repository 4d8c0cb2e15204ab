"""What vLLM, NIM and trtllm-serve accept, asked with the official client: each is done, not only taken."""

import http.client
import json
from collections.abc import Iterator
from math import exp
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from pipelines.serving.frontend import OpenAiFrontend  # noqa: E402 - after the skip
from pipelines.serving.process import TritonServer  # noqa: E402
from tests.contract.serving.echo_repository import WORDS  # noqa: E402
from tests.contract.serving.test_front_limits import another_front  # noqa: E402

A, B, C = (WORDS.index(word) for word in "abc")
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call> {"name":"get_weather","arguments":{"city":"Ulm"}} </tool_call>'


@pytest.fixture(scope="module")
def client(frontend: OpenAiFrontend, echo_server: TritonServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=echo_server.openai_url, api_key="none", max_retries=0, timeout=20) as found:
        yield found


def complete(client, prompt="a b c", **given):
    extra = {name: given.pop(name) for name in list(given) if name in EXTRA}
    return client.completions.create(model="echo", prompt=prompt, temperature=0, **given, extra_body=extra)


def chat(client, content="hi", **given):
    extra = {name: given.pop(name) for name in list(given) if name in EXTRA}
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.chat.completions.create(model="echo", messages=messages, temperature=0, **given, extra_body=extra)


EXTRA = (
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "top_k", "repetition_penalty"),
    *("skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens", "chat_template_kwargs"),
    *("add_generation_prompt", "return_tokens_as_token_ids", "lora_task_id"),
)


def text(answer) -> str:
    return answer.choices[0].text


def test_the_chosen_tokens_have_log_probabilities(client) -> None:
    """The n-th has -n / 8, also in a stream, where the engine sends all so far with each."""
    found = complete(client, max_tokens=3, logprobs=0).choices[0].logprobs
    assert (found.tokens, found.token_logprobs) == ([" a", " b", " c"], [-0.125, -0.25, -0.375])
    assert (found.text_offset, found.top_logprobs) == ([0, 2, 4], None)
    streamed = list(complete(client, max_tokens=3, logprobs=0, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].text]
    assert [value for part in parts for value in part.token_logprobs] == found.token_logprobs
    assert [value for part in parts for value in part.text_offset] == found.text_offset


def test_the_likeliest_tokens_have_their_own(client) -> None:
    """The engine's logits fall by 1 with each step away from the chosen word."""
    size, middle = len(WORDS), A
    total = sum(exp(-abs(other - middle)) for other in range(size))
    (score,) = chat(client, "a", max_tokens=1, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    at = WORDS.index("user")
    total = sum(exp(-abs(other - at)) for other in range(size))
    assert score.token == " user"
    assert bytes(score.bytes).decode() == " user"
    assert [best.token for best in score.top_logprobs] == [" user", " long", " :"]
    assert [exp(best.logprob) * total for best in score.top_logprobs] == pytest.approx([1, exp(-1), exp(-1)], rel=1e-6)
    found = complete(client, max_tokens=1, logprobs=2).choices[0].logprobs
    assert set(found.top_logprobs[0]) == {" a", "<eos>"}
    named = complete(client, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True).choices[0].logprobs
    assert (named.tokens, list(named.top_logprobs[0])) == ([f"token_id:{A}"], [f"token_id:{A}"])


def test_log_probabilities_end_with_the_text(client) -> None:
    """The stop string begins with the second word."""
    found = complete(client, max_tokens=9, logprobs=0, stop=" b c").choices[0]
    assert (found.text, found.logprobs.tokens) == (" a", [" a"])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_tokens_end_the_answer_without_their_text(client, stream) -> None:
    answer = complete(client, max_tokens=9, stop_token_ids=[B], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == " a"
    assert choices[-1].finish_reason == "stop"


def test_a_stop_string_may_be_kept(client) -> None:
    assert text(complete(client, max_tokens=9, stop=" b", include_stop_str_in_output=True)) == " a b"


def test_many_stop_strings(client) -> None:
    assert text(complete(client, max_tokens=9, stop=["x", "y", "u", "v", "w", " c"])) == " a b"


def test_an_answer_stops_at_the_text_inside_a_token(client) -> None:
    """`<tool_call>` is one token; the engine could not stop inside it. Fewer than 60 tokens were counted."""
    answer = complete(client, "a <tool_call>", max_tokens=60, stop="tool")
    assert text(answer) == " a <"
    assert answer.usage.completion_tokens == 2


def test_an_adapter_answers_by_its_id(client) -> None:
    assert text(complete(client, max_tokens=3)) == " a b c"
    assert text(complete(client, max_tokens=3, lora_task_id=1)) == " b c a"
    first = chat(client, max_tokens=1).choices[0].message.content
    asked = {"model": "echo", "input": "hi", "max_output_tokens": 3, "temperature": 0}
    response = client.responses.create(**asked, extra_body={"lora_task_id": 1})
    assert response.output_text not in ("", client.responses.create(**asked).output_text)
    assert response.output[0].status == response.status == "incomplete"
    assert chat(client, max_tokens=1, lora_task_id=1).choices[0].message.content not in ("", first)
    with pytest.raises(openai.BadRequestError, match="lora_task_id: Input should be greater than or equal to 0"):
        complete(client, lora_task_id=-1)
    with pytest.raises(openai.BadRequestError, match="lora_task_id: Input should be greater than or equal to 0"):
        client.responses.create(**asked, extra_body={"lora_task_id": -1})


def test_nothing_ends_an_answer_before_its_least_length(client) -> None:
    assert text(complete(client, max_tokens=9, min_tokens=4, stop=" b")) == " a b c a"
    assert text(complete(client, max_tokens=9, min_tokens=4, stop_token_ids=[B])) == " a b c a"


def test_the_end_token_may_be_ignored(client) -> None:
    """The engine, like TensorRT-LLM, ends only at the end_id that it was given."""
    assert complete(client, "a end", max_tokens=6).usage.completion_tokens == 1
    assert complete(client, "a end", max_tokens=6, ignore_eos=True).usage.completion_tokens == 6


def test_logits_are_biased(client) -> None:
    assert text(complete(client, max_tokens=2, logit_bias={str(C): 50, str(B): -50})) == " c c"


def test_sampling_settings_are_taken(client) -> None:
    answer = client.completions.create(
        model="echo", prompt="a b", max_tokens=1, seed=1, best_of=1, n=1,
        extra_body={"top_k": 40, "repetition_penalty": 1.1, "min_p": 0, "use_beam_search": False},
    )  # fmt: skip
    assert text(answer) == " b"


def test_special_tokens_are_shown_when_asked_for(client) -> None:
    special = [A, WORDS.index("<unk>")]
    assert text(complete(client, special, max_tokens=2)).strip() == "a"
    assert text(complete(client, special, max_tokens=2, skip_special_tokens=False)).strip() == "a<unk>"


def test_prompts_are_cut_from_the_left(client) -> None:
    """<bos> stays."""
    answer = complete(client, "a b c d", max_tokens=2, truncate_prompt_tokens=3)
    assert (text(answer), answer.usage.prompt_tokens) == (" c d", 3)
    answer = complete(client, "a b c d", max_tokens=2, truncate_prompt_tokens=2, add_special_tokens=False)
    assert (text(answer), answer.usage.prompt_tokens) == (" c d", 2)
    assert complete(client, "a " * 500, max_tokens=1, truncate_prompt_tokens=-1).usage.prompt_tokens == 64


def test_usage_with_every_chunk(client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, max_tokens=3, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3, 3]
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat_template_kwargs": {"loud": "words"}}, "user : hi words assistant :"),
        ({"add_generation_prompt": False}, "user : hi user"),
    ],
)
def test_the_template_gets_what_is_for_it(client, given, said) -> None:
    """The echo repeats the prompt."""
    answer = chat(client, max_tokens=len(said.split()), **given)
    assert answer.choices[0].message.content.split() == said.split()


def call_of(answer):
    (call,) = answer.choices[0].message.tool_calls
    return call.type, call.function.name, json.loads(call.function.arguments)


def test_an_answer_may_call_a_tool(client) -> None:
    """The template knows tools and the form of Hermes; the echo repeats the call that it was told."""
    answer = chat(client, f"x {CALL}", tools=[WEATHER], max_tokens=6)
    assert call_of(answer) == ("function", "get_weather", {"city": "Ulm"})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content.split()) == (
        "length", ["user", ":", "x"],
    )  # fmt: skip
    ended = chat(client, f"{CALL} end", tools=[WEATHER])
    assert ended.choices[0].finish_reason == "tool_calls"


def test_a_streamed_call_comes_whole(client) -> None:
    chunks = [chunk.choices[0] for chunk in chat(client, f"x {CALL} end", tools=[WEATHER], stream=True)]
    assert "".join(choice.delta.content or "" for choice in chunks).split() == ["user", ":", "x"]
    (call,) = [call for choice in chunks for call in choice.delta.tool_calls or ()]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "get_weather", {"city": "Ulm"})
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_ends_the_answer(client, stream) -> None:
    """The echo would say more for ever; without the parameter, both calls are returned."""
    words = f"x {CALL} {CALL}"
    several = chat(client, words, tools=[WEATHER], max_tokens=12)
    assert len(several.choices[0].message.tool_calls) == 2
    answer = chat(client, words, tools=[WEATHER], parallel_tool_calls=False, stream=stream,
                  **({"stream_options": {"include_usage": True}} if stream else {}))  # fmt: skip
    if stream:
        *chunks, last = answer
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        made = last.usage.completion_tokens
    else:
        assert call_of(answer) == ("function", "get_weather", {"city": "Ulm"})
        assert answer.choices[0].finish_reason == "tool_calls"
        calls, made = answer.choices[0].message.tool_calls, answer.usage.completion_tokens
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Ulm"}]
    assert made == 6, "user : x, and the three of the call"


def test_one_call_ends_a_response(client) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
    asked = {"model": "echo", "input": f"x {CALL} {CALL}", "tools": [tool], "parallel_tool_calls": False}
    answer = client.responses.create(**asked, temperature=0)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert (answer.status, answer.usage.output_tokens) == ("completed", 6)


def test_what_is_no_call_stays_text(client) -> None:
    answer = chat(client, "<tool_call> a end", tools=[WEATHER])
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content.split() == ["user", ":", "<tool_call>", "a"]
    free = chat(client, f"{CALL} end", tools=[WEATHER], tool_choice="none")
    assert free.choices[0].message.content.split()[2] == "<tool_call>"


def test_a_tools_answer_goes_through_the_template(client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ]
    assert chat(client, messages, max_tokens=8, tools=[WEATHER]).usage.prompt_tokens > 9
    call["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="error parsing the arguments of a call of 'get_weather'"):
        chat(client, messages)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", "'tool_choice' = 'required' is not supported here.*guided=llguidance adds it"),
        ({"type": "function", "function": {"name": "get_weather"}}, "'tool_choice' = .*get_weather.*guided=llguidance"),
        ({"type": "function", "function": {"name": "trains"}}, "'tool_choice' = .*trains.* It is none of the tools"),
    ],
)
def test_a_call_is_promised_only_where_a_guide_can_keep_it(client, choice, said) -> None:
    """tests/contract/faults/test_forced_calls.py has a server that can."""
    with pytest.raises(openai.BadRequestError, match=said):
        chat(client, tools=[WEATHER], tool_choice=choice)
    with pytest.raises(openai.BadRequestError, match=r"'tool_choice' = .* It needs tools"):
        chat(client, tool_choice=choice)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({"name": 3}, "'tools' = .*3.* A tool is of type function and has a function with a name"),
        ({"name": "f", "parameters": ["city"]}, "'tools' = .*city.* The parameters of a function are a JSON schema"),
    ],
)
def test_what_is_no_tool_is_refused(client, function, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chat(client, tools=[{"type": "function", "function": function}])


def test_responses_answer(client) -> None:
    answer = client.responses.create(model="echo", input="hi", instructions="words", max_output_tokens=5, temperature=0)
    assert answer.output_text.split() == ["system", ":", "words", "user", ":"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (9, 5)
    type(answer).model_validate(answer.to_dict())  # which the client itself does not
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a end"}]}]
    assert client.responses.create(model="echo", input=parts, temperature=0).status == "completed"


def test_responses_stream(client) -> None:
    """The client's own accumulator puts the same response together."""
    with client.responses.stream(model="echo", input="a end", temperature=0) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_response()
    assert whole.output_text.split() == ["user", ":", "a"]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds.count("response.output_text.delta") == 3
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "'tools' = .* is not supported here. Only functions are"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' = 'resp_1' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input' = .*item_reference.* is not supported"),
        ({"extra_body": {"nonsense": 0}}, "Unknown parameter: 'nonsense'"),
    ],
)
def test_responses_refuse_what_they_cannot(client, given, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{"model": "echo", "input": "a"} | given)


def test_images_are_refused_with_the_reason(client) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="Only text content is supported: this service takes no pictures"):
        chat(client, image)


def send(server: TritonServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(server.host, server.ports["openai_port"], timeout=10)
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    raw = answer.read()
    return answer.status, json.loads(raw) if raw.startswith(b"{") else raw, answer.headers


def test_texts_are_tokenized(frontend, echo_server) -> None:
    status, found, _ = send(echo_server, "POST", "/tokenize", {"prompt": "a b"})
    assert (status, found) == (200, {"count": 3, "max_model_len": 64, "tokens": [1, A, B]})
    messages = [{"role": "user", "content": "hi"}]
    assert send(echo_server, "POST", "/tokenize", {"messages": messages})[1]["count"] == 6
    assert send(echo_server, "POST", "/detokenize", {"tokens": [A, B]})[1] == {"prompt": "a b"}
    for body, code, holds in (
        ({"tokens": [A, len(WORDS) + 9]}, 400, f"'tokens' has token {len(WORDS) + 9}"),
        ({"tokens": [A], "model": "other"}, 404, "The model 'other' does not exist"),
    ):
        status, found, _ = send(echo_server, "POST", "/detokenize", body)
        assert (status, holds in found["error"]["message"]) == (code, True)
    status, found, _ = send(echo_server, "POST", "/tokenize", {})
    assert (status, "give either 'prompt' or 'messages'" in found["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "holds"),
    [
        ("/version", b"version"), ("/v1/version", b"version"), ("/v1/health/ready", b""), ("/v1/health/live", b""),
        ("/v1/metadata", b"echo"), ("/v1/metrics", b"nv_inference_request_success"),
    ],
)  # fmt: skip
def test_places_of_others_answer(frontend, echo_server, path, holds) -> None:
    status, found, _ = send(echo_server, "GET", path)
    assert (status, holds in (json.dumps(found).encode() if isinstance(found, dict) else found)) == (200, True)


def test_web_pages_are_let_in_only_when_named(frontend, echo_server) -> None:
    ask = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
    allowed = "Access-Control-Allow-Origin"
    assert send(echo_server, "OPTIONS", "/v1/completions", **ask)[2][allowed] is None
    with another_front(echo_server, cors_origins=("https://chat.example.com",)) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("OPTIONS", "/v1/completions", headers=ask)
        assert connection.getresponse().headers[allowed] == "https://chat.example.com"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/echo", "/v1/metrics", "/version"])
def test_heads_can_be_asked_for(frontend, echo_server, path) -> None:
    """As health checks of load balancers do."""
    whole = send(echo_server, "GET", path)
    head = send(echo_server, "HEAD", path)
    assert (head[0], head[1], head[2]["Content-Type"]) == (200, b"", whole[2]["Content-Type"])


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("OPTIONS", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET")],
)
def test_the_methods_of_a_place_are_named(frontend, echo_server, method, path, allowed) -> None:
    status, found, headers = send(echo_server, method, path)
    assert (status, allowed in headers["Allow"].split(", ")) == (405, True)
    assert found["error"]["message"] == f"{method} {path} is not answered: this path takes {headers['Allow']}."


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd, gzip"])
def test_a_coded_body_is_refused_by_its_coding(frontend, echo_server, coding) -> None:
    """What it decodes to could have any size."""
    status, found, _ = send(echo_server, "POST", "/v1/completions", {}, **{"Content-Encoding": coding})
    assert status == 415
    assert f"Content-Encoding is '{coding}'" in found["error"]["message"]
    given = {"model": "echo", "prompt": "a", "max_tokens": 1}
    assert send(echo_server, "POST", "/v1/completions", given, **{"Content-Encoding": "identity"})[0] == 200


def test_more_tokens_at_least_than_at_most_are_refused(client) -> None:
    with pytest.raises(openai.BadRequestError, match="'min_tokens' = 5 is more than the 2 tokens") as error:
        complete(client, max_tokens=2, min_tokens=5)
    assert error.value.param == "min_tokens"
    with pytest.raises(openai.BadRequestError, match="'min_tokens' = 60 is more than the 58 tokens"):
        chat(client, min_tokens=60)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "a", "wings": 1}, "A message has 'wings' = 1"),
        ({"content": "a", "wings": False}, "A message has 'wings' = False"),
        ({"content": [{"type": "text", "text": "a", "wings": "x"}]}, "A part of a message has 'wings' = 'x'"),
        ({"content": "a", "type": "image"}, "A message has 'type' = 'image'"),
    ],
)
def test_what_a_message_has_beside_its_text_is_not_ignored(client, message, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chat(client, [{"role": "user", **message}])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "a", "wings": 1}, "A message of 'input' has 'wings' = 1"),
        ({"content": [{"type": "input_text", "text": "a", "wings": "x"}]}, "A part of a message has 'wings' = 'x'"),
    ],
)
def test_what_an_input_has_beside_its_text_is_not_ignored(client, message, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(model="echo", input=[{"role": "user", **message}])


def test_an_answer_can_be_sent_back_as_it_came(client) -> None:
    """With the empty fields that the client's classes and the service's own answers have."""
    first = chat(client, "a end").choices[0].message
    lm_eval = {"role": "user", "content": "b end", "type": "text"}
    assert chat(client, [{"role": "user", "content": "a"}, first, lm_eval]).usage.prompt_tokens > 9
    assert chat(client, [{"role": "user", "content": "a"}, first.model_dump(), lm_eval]).usage.prompt_tokens > 9
    answer = client.responses.create(model="echo", input="a end", temperature=0)
    again = [*(item.model_dump() for item in answer.output), {"role": "user", "content": "b end"}]
    assert client.responses.create(model="echo", input=again, temperature=0).usage.input_tokens > 6
