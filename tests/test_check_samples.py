"""What `lychee check` samples and what it measures them by."""

from dataclasses import replace

import pytest
import torch

from lychee.check.sampled import SampleProof, num_requests
from lychee.check.samples import LENGTH, PER_REQUEST, Place, Sample, draw, starts
from lychee.check.subject import Subject
from lychee.runtime.checks import ParameterError
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.sequence import Mode
from tests.conftest import DEVICE
from tests.runtime.pairs import PROMPTS, model_dir

PARAMS = SamplingParams(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def subject():
    config = SpeculativeConfig(num_speculative_tokens=3)
    return Subject(LLM(model_dir(), model_dir("near"), config, device=DEVICE, max_num_seqs=PER_REQUEST))


@pytest.fixture(scope="module")
def prompts(subject):
    return [subject.llm.maker.sequences(text, PARAMS, 0)[0].prompt for text in PROMPTS]


def test_a_models_probabilities_are_those_that_native_decoding_reports(subject, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=subject.llm.vocab, ignore_eos=True)
    for prompt in [*prompts, tuple(range(5, 22)), tuple(range(5, 37))]:  # of one block, two, and a whole number
        (output,) = subject.llm.generate([prompt], params, native=True)
        tokens, reported = output.outputs[0].token_ids, output.outputs[0].logprobs
        (seq,) = subject.sequences(prompt, SamplingParams(temperature=1.0), "coupled")
        free = subject.native.scheduler.pool.num_free
        found = [*subject.target.log_probs(seq, [tokens[:5], (7,) * 5])]
        assert subject.native.scheduler.pool.num_free == free
        for rows, step in zip(found, reported, strict=True):
            expected = torch.tensor([step.top[token] for token in range(subject.llm.vocab)])
            assert torch.allclose(rows[0], expected, atol=1e-5)
        assert torch.equal(found[0][0], found[0][1])
        assert not torch.allclose(found[-1][0], found[-1][1], atol=1e-3)


def test_the_draft_reads_in_its_own_cache(subject, prompts):
    (seq,) = subject.sequences(prompts[0], PARAMS, "coupled")
    mine, its = (torch.cat([*reader.log_probs(seq, [(7,)])]) for reader in (subject.target, subject.draft))
    alone = torch.cat(
        [*Subject(LLM(model_dir("near"), model_dir("near"), device=DEVICE)).target.log_probs(seq, [(7,)])]
    )
    assert torch.allclose(its, alone, atol=1e-5)
    assert not torch.allclose(mine, its, atol=1e-3)


def test_samples_start_one_token_past_a_block_on_the_greedy_path(subject, prompts):
    for prompt, start in zip(prompts, starts(subject, prompts), strict=True):
        assert len(start) % subject.native.kv.block_size == 1
        assert len(start) - len(prompt) < subject.native.kv.block_size
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        assert (prompt + subject.complete([prompt], greedy, native=True)[0])[: len(start)] == start


def test_prompts_without_room_are_left_out_or_refused(subject, prompts):
    long = tuple([9] * (subject.llm.max_model_len - 20))
    assert len(starts(subject, [prompts[0], long])) == 1
    with pytest.raises(ParameterError, match="prompts have 236 tokens or more; samples need prompts of at most 152"):
        starts(subject, [long])


def test_a_sample_says_where_its_tokens_were_drawn(subject, prompts):
    params = replace(PARAMS, n=40)
    samples = draw(subject, prompts[0], params)
    assert len(samples) == 40
    for sample in samples:
        assert len(sample.tokens) == len(sample.places) == LENGTH
        assert sample.places[:2] == (Place.PREFILL, Place.FIRST_ROUND)
    assert {place for sample in samples for place in sample.places} == set(Place)
    assert samples == draw(subject, prompts[0], params)
    assert subject.engine.idle


def test_samples_are_drawn_prompt_after_prompt_and_no_two_requests_share_a_seed(subject, prompts):
    proof = SampleProof(subject, (prompts[0], prompts[1]), PARAMS, PER_REQUEST + 10)
    asked = [(prompt, params.n, params.seed - PARAMS.seed) for prompt, params in proof._requests()]
    assert asked == [(prompts[i % 2], (PER_REQUEST, 10)[i // 2], i) for i in range(4)]
    assert len(asked) == num_requests(2, PER_REQUEST + 10)


def test_the_same_seed_finds_the_same(subject, prompts):
    first, again, other = (
        SampleProof(subject, (prompts[0],), replace(PARAMS, seed=seed), 16).run(lambda: None) for seed in (5, 5, 6)
    )
    assert first.evidence.tests == again.evidence.tests != other.evidence.tests


def sample(*steps):
    """Whose tokens are 0, 1, 2, ..."""
    return Sample(tuple(range(sum(steps))), steps)


def test_places_follow_what_each_step_emitted():
    prefill, first, inside, refused, accepted = Place
    found = sample(1, 1, 1, 3, 2)
    assert found.places == (prefill, first, refused, refused, inside, inside, accepted, inside)
    assert found.rounds == (0, 1, 2, 3, 3, 3, 4, 4)
    assert sample(1, 4, 1).places == (prefill, first, inside, inside, inside, accepted)
    assert Sample((0, 1, 2), (1, 1, 3)).places == (prefill, first, refused)


def test_a_tokens_candidates_ended_earlier_rounds_as_deep():
    nothing = frozenset()
    found = sample(1, 1, 2, 1, 2)
    assert found.candidates == (nothing, nothing, {1}, nothing, {1}, {1, 4}, {3})
    cut = Sample((0, 1, 2), (1, 2, 3))
    assert cut.candidates == (nothing, nothing, nothing)


@pytest.mark.parametrize("verify", ["auto", "coupled", "rejection"])
def test_every_way_of_accepting_is_proved_whatever_the_configuration_names(verify):
    subject = Subject(LLM(model_dir(), model_dir("near"), SpeculativeConfig(verify=verify), device=DEVICE))
    modes = [subject.sequences("a", PARAMS, how)[0].mode for how in (subject.rejection, "coupled")]
    assert modes == [Mode.REJECTION, Mode.COUPLED]
