"""A conversation at the terminal: what it remembers, what it leaves out, and how it ends."""

import builtins
from collections.abc import Iterable

import pytest

from lychee import LLM, run
from lychee.conversation import converse
from tests.runtime.pairs import greedy, model_dir

PARAMS = greedy(max_tokens=6, ignore_eos=True)


def reader(lines: Iterable[str | type[BaseException]]):
    """Gives the lines one by one, raises those that are exceptions, then says that the input has ended."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        if not isinstance(line := left.pop(0), str):
            raise line
        return line

    return read


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_dir("T"), model_dir("near"), device="cpu")


def user(text):
    return {"role": "user", "content": text}


def test_every_turn_sees_those_before_it(llm, capsys):
    made = converse(llm, PARAMS, reader(["hello", "", "and then?"]))
    first, second = (c for output in made.outputs for c in output.outputs)
    messages = [user("hello")]
    assert first.text == llm.chat(messages, PARAMS).outputs[0].text
    messages += [{"role": "assistant", "content": first.text}, user("and then?")]
    assert second.text == llm.chat(messages, PARAMS).outputs[0].text
    assert capsys.readouterr().out == f"{first.text}\n{second.text}\n\n"


def test_a_turn_does_not_read_those_before_it_again(capsys):
    llm = LLM(model_dir("T"), model_dir("near"), device="cpu", block_size=4)
    made = converse(llm, PARAMS, reader(["hello", "and then?", "go on"]))
    prompts = [output.prompt_token_ids for output in made.outputs]
    for before, prompt, completion in zip(prompts, prompts[1:], made.completions[1:], strict=False):
        same = next(i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b or i + 1 == len(before))
        assert completion.stats.cached_tokens >= same // 4 * 4 > 12


def test_the_oldest_turns_make_room(llm, capsys, monkeypatch):
    seen = []
    encode = llm.encode_chat
    monkeypatch.setattr(llm, "encode_chat", lambda messages: seen.append(list(messages)) or encode(messages))
    made = converse(llm, PARAMS, reader(["word " * 30] * 8))
    assert len(made.outputs) == 8
    assert "the oldest turn is left out" in capsys.readouterr().err
    for messages in seen:
        assert [m["role"] for m in messages] == (["user", "assistant"] * len(messages))[: len(messages)]
        assert messages[-1]["role"] == "user"


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(llm, capsys):
    made = converse(llm, PARAMS, reader(["word " * 5000, "hello"]))
    assert len(made.outputs) == 1
    assert made.completions[0].text == llm.chat([user("hello")], PARAMS).outputs[0].text
    assert "lychee run: " in capsys.readouterr().err


def test_an_interrupt_at_the_prompt_ends_it(llm):
    assert len(converse(llm, PARAMS, reader(["hello", KeyboardInterrupt, "never read"])).outputs) == 1


def test_an_interrupt_in_an_answer_ends_that_answer(llm, monkeypatch):
    shown = []

    def interrupt(*args, **kwargs):
        shown.append(args)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    made = converse(llm, greedy(max_tokens=30, ignore_eos=True), reader(["hello", "go on"]))
    assert [c.finish_reason for c in made.completions] == ["abort", "length"]


def test_chat_at_a_terminal_converses(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", reader(["hello"]))
    assert run.main([str(model_dir("T")), "--chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "tokens/s" in err


def test_one_token_is_not_called_tokens(llm, capsys):
    converse(llm, greedy(max_tokens=1, ignore_eos=True), reader(["hello"]))
    assert "[1 token, " in capsys.readouterr().err


def test_the_systems_message_stays_while_turns_are_left_out(llm, monkeypatch):
    seen = []
    encode = llm.encode_chat
    monkeypatch.setattr(llm, "encode_chat", lambda messages: seen.append(list(messages)) or encode(messages))
    converse(llm, PARAMS, reader(["word " * 8] * 8), system="be brief")
    assert max(map(len, seen)) > 4
    assert len(seen) > 8  # some were too long
    for messages in seen:
        assert messages[0] == {"role": "system", "content": "be brief"}
        assert [m["role"] for m in messages[1:]] == (["user", "assistant"] * len(messages))[: len(messages) - 1]
        assert messages[-1]["role"] == "user"


def test_a_batch_size_has_no_use_in_a_conversation(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert run.main([str(model_dir("T")), "--chat", "--batch-size", "2"]) == 2
    assert "--batch-size has no use in a conversation" in capsys.readouterr().err
