"""The dialled drafter is right as often as it is set to, whatever it costs, and never changes what is emitted."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import dialled
from bench.dialled_drafter import DialledDrafter, landed, rank_rates
from lychee import LLM, SamplingParams, demo
from lychee.models.names import resolve_model
from lychee.runtime.controller import Fixed
from lychee.runtime.metrics import Metrics
from lychee.runtime.tree import TreeShape

SMOLLM2 = Path.home() / ".cache/lychee/models/smollm2"


def found_rate(llm, prompts, dial, max_tokens):
    """What acceptance lands at, of greedy requests whose tokens must stay the native ones."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, native=True)
    native = {output.prompt_token_ids: output.outputs[0].token_ids for output in outputs}
    engine = llm.engine()
    engine.drafter = DialledDrafter(engine.drafter, native, rank_rates(dial, 0.3), llm.vocab)
    engine.controller, engine.metrics = Fixed(TreeShape.chain(4)), Metrics()
    again = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in again] == list(native.values())
    return landed(engine.metrics)


@pytest.mark.parametrize("dial", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
def test_acceptance_of_the_packaged_pair_lands_within_two_hundredths_of_the_dial(dial):
    prompts = [prompt for kind in demo.prompts().values() for prompt in kind]
    assert found_rate(LLM(demo.TARGET, demo.DRAFT), prompts, dial, 128) == pytest.approx(dial, abs=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs `lychee get smollm2`")
@pytest.mark.parametrize("dial", [0.5, 0.6, 0.7, 0.8])
def test_acceptance_of_smollm2_lands_within_two_hundredths_of_the_dial(dial):
    llm = LLM(resolve_model("smollm2"), resolve_model("smollm2-draft"))
    prompts = ["The sea", "def f(x):", "Once upon a time", "A lychee is", "In 1905", "To cook rice", "1, 2, 3", "Dear"]
    assert found_rate(llm, prompts, dial, 128) == pytest.approx(dial, abs=0.02)


def drafted(rates, count=40):
    """Which child of each rank was the native token, over `count` requests of 64 tokens, at every place."""
    shape, ranks = TreeShape.widths((3,)), Counter()
    for request in range(count):
        prompt, native = (request, 7), tuple(range(64))
        drafter = DialledDrafter(SimpleNamespace(max_len=99), {prompt: native}, rates, 1000)
        for done in range(64):
            emitted = list(native[:done])
            seq = SimpleNamespace(prompt=prompt, tokens=[*prompt, *emitted], emitted=emitted, num_emitted=done)
            tokens = drafter._tree(seq, shape).tokens
            assert len(set(tokens[1:])) == 3
            ranks[tokens[1:].index(done) if done in tokens[1:] else None] += 1
    return {rank: times / (64 * count) for rank, times in ranks.items()}


def test_siblings_are_right_at_the_rates_of_their_ranks():
    rates = rank_rates(0.6, 0.5)
    assert rates[:3] == pytest.approx((0.6, 0.2, 0.1))
    found = drafted(rates)
    assert [found[rank] for rank in range(3)] == pytest.approx(rates[:3], abs=0.02)
    assert found[None] == pytest.approx(0.1, abs=0.02)


def test_a_dial_of_one_is_never_wrong_and_of_nought_always():
    assert drafted(rank_rates(1.0, 0.3), 2) == {0: 1.0}
    assert set(drafted((0.0, 0.0, 0.0), 2)) == {None}


def test_a_request_that_is_not_greedy_or_says_something_else_is_refused():
    drafter = DialledDrafter(SimpleNamespace(max_len=9, propose=lambda *_: None), {(1,): (2, 3)}, (0.5,), 9)
    with pytest.raises(ValueError, match="greedy requests"):
        drafter.propose(SimpleNamespace(greedy=np.array([False]), seqs=()), [])
    seq = SimpleNamespace(prompt=(1,), tokens=[1, 5], emitted=[5], num_emitted=1)
    with pytest.raises(ValueError, match="speculation is broken"):
        drafter.propose(SimpleNamespace(greedy=np.array([True]), seqs=(seq,)), [TreeShape.chain(1)])


def test_the_bench_writes_a_row_for_native_and_for_every_dial(tmp_path, capsys):
    file = tmp_path / "rows.json"
    flags = ["--batches", "1,2", "--acceptance", "0.5,0.8", "--prompt-len", "24", "--max-tokens", "40"]
    dialled.main([*flags, "--trees", "3;2,1", "--draft-format", "int8", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["batch"], row["way"], row["acceptance"]) for row in rows[:5]] == [
        (1, "native", None),
        *((1, f"dialled, tree {tree}", dial) for tree in ("3", "2,1") for dial in (0.5, 0.8)),
    ]
    assert len(rows) == 10
    for row in rows:
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(40 * row["batch"])
        assert 0 < row["ttft"] < row["seconds"]
    assert rows[1]["owned_bytes"] > rows[0]["owned_bytes"]
    assert "dialled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--target", "9b"], "9b is neither a file nor one of llama-2-7b"),
        (["--draft", "tinyllama-1.1b", "--target", "tiny"], "they must share them"),
        (["--acceptance", "70"], "must be rates from 0 to 1"),
        (["--trees", "auto"], "must be a number, or numbers between commas"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, flags, sentence):
    with pytest.raises(SystemExit):
        dialled.main(flags)
    assert sentence in capsys.readouterr().err
