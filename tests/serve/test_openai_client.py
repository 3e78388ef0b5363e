"""The official client, unchanged, over a real socket: every answer is what native decoding of the target says."""

import openai
import pytest

from tests.serve.running import CODE, MODEL, native, reference

GREEDY = {"temperature": 0.0, "max_tokens": 24}
SEEDED = {"temperature": 0.8, "seed": 5, "max_tokens": 24}


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=service.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def complete(client):
    return lambda prompt=CODE, **given: client.completions.create(model=MODEL, prompt=prompt, **given)


def ids(text):
    return native().tokenizer.encode(text)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_plain_completion_is_that_of_native_decoding(complete, params):
    answer, (expected,) = complete(**params), reference(CODE, **params)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, expected.finish_reason, 0)
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    used = answer.usage
    assert used.prompt_tokens == len(ids(CODE))
    assert used.completion_tokens == len(expected.token_ids)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_streamed_deltas_join_to_the_completion(complete, params):
    (expected,) = reference(CODE, **params)
    chunks = [*complete(stream=True, **params)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert 1 < len(chunks) < 24  # several, and several tokens in some


def test_a_stream_ends_with_usage_where_it_is_asked_for(complete):
    *chunks, last = complete(stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(ids(CODE)), 24)


def test_prompts_may_be_token_ids_and_several(complete):
    prompts = [CODE, "The file "]
    expected = [reference(prompt, **GREEDY)[0].text for prompt in prompts]
    for given in (prompts, [ids(prompt) for prompt in prompts]):
        answer = complete(given, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == sum(len(ids(prompt)) for prompt in prompts)
    assert complete(ids(CODE), **GREEDY).choices[0].text == expected[0]


def test_n_completions_are_those_of_native_decoding_whole_and_streamed(complete):
    expected = [output.text for output in reference(CODE, n=3, **SEEDED)]
    assert len(set(expected)) == 3
    answer = complete(n=3, **SEEDED)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 3 * 24
    texts = ["", "", ""]
    for chunk in complete(n=3, stream=True, **SEEDED):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_stop_strings_end_a_text_before_they_begin(complete):
    whole = reference(CODE, **GREEDY)[0].text
    stop = whole[20:23]
    answer = complete(stop=stop, **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].stop_reason == stop
    streamed = complete(stop=[stop, "never"], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_logprobs_are_native_ones_whole_and_streamed(complete):
    (expected,) = reference(CODE, logprobs=2, **GREEDY)
    found = complete(logprobs=2, **GREEDY).choices[0].logprobs
    assert found.token_logprobs == [p.logprob for p in expected.logprobs]
    assert "".join(found.tokens) == expected.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(24)]
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs  # greedy
    assert all(len(top) == 2 for top in found.top_logprobs)
    parts = [chunk.choices[0].logprobs for chunk in complete(logprobs=2, stream=True, **GREEDY)]
    assert [v for part in parts for v in part.token_logprobs] == found.token_logprobs
    assert [v for part in parts for v in part.text_offset] == found.text_offset


def test_logit_bias_bans_and_forces_tokens(complete):
    token = reference(CODE, **GREEDY)[0].token_ids[0]
    assert complete(logit_bias={str(token): -100}, **GREEDY).choices[0].text != reference(CODE, **GREEDY)[0].text
    forced = complete(logit_bias={str(token): 100}, temperature=0, max_tokens=3)
    assert forced.choices[0].text == native().tokenizer.decode([token] * 3, continuation=True)


def test_parameters_beyond_openais_are_taken(complete):
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2}
    answer = complete(extra_body=extra, **SEEDED)
    assert answer.choices[0].text == reference(CODE, **extra, **SEEDED)[0].text


@pytest.mark.parametrize("speculative", [True, False])
def test_speculation_may_be_chosen_by_request_and_changes_nothing(service, complete, speculative):
    drafted = service.service.engine.engine.metrics.drafted
    answer = complete(extra_body={"speculative": speculative}, **SEEDED)
    assert answer.choices[0].text == reference(CODE, **SEEDED)[0].text
    assert (service.service.engine.engine.metrics.drafted > drafted) is speculative


MESSAGES = [{"role": "system", "content": "Code."}, {"role": "user", "content": [{"type": "text", "text": CODE}]}]
RENDERED = "Code.\n" + CODE + "\n"


def chat_reference(**params):
    return reference(tuple(native().tokenizer.encode_chat(RENDERED)), **params)


def test_a_chat_is_native_decoding_of_the_rendered_messages(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, **SEEDED
    )
    for choice, expected in zip(answer.choices, chat_reference(n=2, logprobs=3, **SEEDED), strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
        assert choice.finish_reason == expected.finish_reason
        assert [entry.logprob for entry in choice.logprobs.content] == [p.logprob for p in expected.logprobs]
        assert bytes(b for entry in choice.logprobs.content for b in entry.bytes).decode() == expected.text
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == 48


def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_reason(client):
    create = client.chat.completions.create
    chunks = [*create(model=MODEL, messages=MESSAGES, stream=True, max_completion_tokens=24, temperature=0.8, seed=5)]
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    text = "".join(choice.delta.content or "" for choice in (first, *middle, last))
    assert text == chat_reference(**SEEDED)[0].text
    assert last.finish_reason == "length"
    assert all(choice.finish_reason is None for choice in middle)


def test_the_clients_own_accumulation_of_a_chat_stream_works(client):
    whole = chat_reference(**SEEDED)[0].text
    stop = whole[12:15]
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, stop=stop, **SEEDED) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.index(stop)]


def test_a_chat_without_max_tokens_may_use_the_whole_context(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == native().max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert caught.value.body["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10000}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "x"]}, "prompt"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": "long " * 2000}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"extra_body": {"beam_width": 4}}, "beam_width"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_wrong_is_named(complete, given, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(**given)
    assert caught.value.body["param"] == param
    assert param in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(client, given, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | given)
    assert caught.value.body["param"] == param


def test_an_error_before_the_first_token_has_its_own_status_in_a_stream_too(complete):
    with pytest.raises(openai.BadRequestError):
        complete(stream=True, max_tokens=10000)
    with pytest.raises(openai.BadRequestError):
        complete(stream=True, prompt=[9999])
