"""Greedy and coupled speculation give the tokens of native decoding, for any draft, length and batch."""

import random
from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest

from lychee import demo
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ModelDrafter, ScriptedDrafter
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.tree import TreeShape

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt for kind in demo.prompts().values() for prompt in kind]
SOME = PROMPTS[::8]


@pytest.fixture(scope="module")
def llm():
    return LLM(demo.TARGET, demo.DRAFT, max_num_seqs=8)


def complete(llm, prompts, params, batch, native):
    outputs = []
    for start in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[start : start + batch], params, native=native)
    return outputs


def assert_equal(reference, outputs):
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in reference]


def set_length(llm, length):
    llm.engine().controller = Fixed(TreeShape.chain(length))


@pytest.mark.parametrize(("length", "batch"), [(1, 4), (3, 1), (5, 4), (8, 1)])
def test_greedy_equals_native_on_packaged_prompts(llm, length, batch):
    set_length(llm, length)
    reference = complete(llm, SOME, GREEDY, batch, native=True)
    outputs = complete(llm, SOME, GREEDY, batch, native=False)
    assert_equal(reference, outputs)


@pytest.mark.parametrize(("length", "batch"), [(3, 4), (8, 1)])
def test_a_seed_gives_the_tokens_of_native_decoding(llm, length, batch):
    set_length(llm, length)
    params = replace(GREEDY, temperature=0.8, top_p=0.95, top_k=100, min_p=0.01, seed=11)
    reference = complete(llm, SOME, params, batch, native=True)
    outputs = complete(llm, SOME, params, batch, native=False)
    assert_equal(reference, outputs)


def test_a_seed_does_not_depend_on_the_batch_or_the_plan(llm):
    params = replace(GREEDY, temperature=0.8, seed=5)
    set_length(llm, 2)
    alone = [llm.generate(p, params)[0].outputs[0].token_ids for p in SOME]
    llm.engine().controller = _RandomLengths(3)
    together = [o.outputs[0].token_ids for o in llm.generate(SOME, params)]
    assert together == alone


class _RandomLengths:
    """A controller that changes its mind every round, per request, native rounds included."""

    shapes = ()

    def __init__(self, seed):
        self.draws = random.Random(seed)

    def plan(self, request_ids):
        return [Fixed(TreeShape.chain(self.draws.randint(0, 6))).plan([i])[0] for i in request_ids]

    goes_on = None

    def observe(self, request_id, tree, path, emitted): ...

    def timed(self, trees, draft_ms, verify_ms, other_ms): ...

    def forget(self, request_id): ...


def test_native_stretches_leave_the_draft_behind_and_it_catches_up(llm):
    llm.engine().controller = _RandomLengths(1)
    reference = complete(llm, SOME, GREEDY, 4, native=True)
    outputs = complete(llm, SOME, GREEDY, 4, native=False)
    assert_equal(reference, outputs)


@pytest.mark.parametrize("script", ["wrong", "right", "random", "right then wrong"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_adversarial_drafter_changes_nothing(script, temperature):
    llm = LLM(demo.TARGET)
    params = replace(GREEDY, temperature=temperature, seed=3)
    reference = llm.generate(SOME[:2], params)
    continuation = {o.prompt_token_ids: o.outputs[0].token_ids for o in reference}
    draws = random.Random(0)

    def propose(seq, length):
        right = list(continuation[seq.prompt][seq.num_emitted : seq.num_emitted + length])
        wrong = [(token + 1) % llm.vocab for token in right]
        noise = [draws.randrange(llm.vocab) for _ in right]
        return {"right": right, "wrong": wrong, "random": noise, "right then wrong": right[:2] + wrong[2:]}[script]

    engine = llm.engine()
    engine.drafter, engine.controller = ScriptedDrafter(propose, llm.vocab), Fixed(TreeShape.chain(5))
    outputs = llm.generate(SOME[:2], params)
    assert_equal(reference, outputs)
    accepted = sum(o.outputs[0].stats.accepted for o in outputs)
    assert (accepted > 0) == script.startswith("right")


@pytest.mark.parametrize(
    ("verify", "temperature"),
    [("auto", 0.0), ("coupled", 0.9), ("rejection", 0.9)],
    ids=["greedy", "coupled", "rejection"],
)
def test_a_draft_equal_to_the_target_is_always_accepted(verify, temperature):
    llm = LLM(demo.TARGET, demo.TARGET, SpeculativeConfig(num_speculative_tokens=4, verify=verify))
    (output,) = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=200, temperature=temperature, seed=2))
    stats = output.outputs[0].stats
    assert stats.accepted == stats.drafted > 0
    full, last = divmod(stats.emitted_in_rounds, 5)
    assert stats.rounds == full + (last > 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("length", [1, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_equals_native_on_all_packaged_prompts(llm, length, batch, temperature):
    set_length(llm, length)
    params = replace(GREEDY, max_tokens=96, temperature=temperature, seed=1)
    reference = complete(llm, PROMPTS, params, batch, native=True)
    outputs = complete(llm, PROMPTS, params, batch, native=False)
    assert_equal(reference, outputs)


def test_the_config_chooses_the_controller_and_the_length():
    llm = LLM(demo.TARGET, demo.DRAFT, {"max_draft_len": 8, "adaptive": False})
    (output,) = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=10))
    assert output.outputs[0].stats.drafted >= 8


def test_the_first_token_is_emitted_before_the_draft_model_runs(llm):
    def refuse(*_):
        raise AssertionError("the draft model ran")

    set_length(llm, 4)
    with patch.object(ModelDrafter, "propose", refuse), closing(llm.stream(PROMPTS[0], GREEDY)) as stream:
        assert len(next(stream).token_ids) == 1
