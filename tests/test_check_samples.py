"""What `lychee check` samples and what it measures them by."""

import pytest
import torch

from lychee.check.samples import LENGTH, PER_REQUEST, Place, draw, places, starts
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
        found = subject.target.log_probs(seq, [tokens[:5], (), tokens[:2]])
        assert subject.native.scheduler.pool.num_free == free
        for row, step in zip(found, (5, 0, 2), strict=True):
            expected = torch.tensor([reported[step].top[token] for token in range(subject.llm.vocab)])
            assert torch.allclose(row, expected, atol=1e-5)


def test_the_draft_reads_in_its_own_cache(subject, prompts):
    (seq,) = subject.sequences(prompts[0], PARAMS, "coupled")
    mine, its = (reader.log_probs(seq, [(), (7,)]) for reader in (subject.target, subject.draft))
    alone = Subject(LLM(model_dir("near"), model_dir("near"), device=DEVICE)).target.log_probs(seq, [(), (7,)])
    assert torch.allclose(its, alone, atol=1e-5)
    assert not torch.allclose(mine, its, atol=1e-3)


def test_samples_start_one_token_past_a_block_on_the_greedy_path(subject, prompts):
    for prompt, start in zip(prompts, starts(subject, prompts), strict=True):
        assert len(start) % subject.native.kv.block_size == 1
        assert len(start) - len(prompt) < subject.native.kv.block_size
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        assert (prompt + subject.complete([prompt], greedy, native=True)[0])[: len(start)] == start


def test_prompts_without_room_are_left_out_or_refused(subject, prompts):
    long = tuple([9] * (subject.llm.max_model_len - 8))
    assert len(starts(subject, [prompts[0], long])) == 1
    with pytest.raises(ParameterError, match="must leave room for"):
        starts(subject, [long])


def test_a_sample_says_where_its_tokens_were_drawn(subject, prompts):
    samples = draw(subject, prompts[0], PARAMS, 40)
    assert len(samples) == 40
    for sample in samples:
        assert len(sample.tokens) == len(sample.places) == LENGTH
        assert sample.places[:2] == (Place.PREFILL, Place.FIRST_ROUND)
    assert {place for sample in samples for place in sample.places} == set(Place)
    assert samples == draw(subject, prompts[0], PARAMS, 40)
    assert subject.engine.idle


def test_more_samples_than_a_request_has_take_the_next_seed(subject, prompts):
    samples = draw(subject, prompts[0], PARAMS, PER_REQUEST + 10)
    following = SamplingParams(temperature=0.9, seed=PARAMS.seed + 1)
    assert samples[PER_REQUEST:] == draw(subject, prompts[0], following, 10)


def test_places_follow_what_each_step_emitted():
    prefill, first, inside, refused, accepted = Place
    assert places([1, 1, 1, 3, 2]) == (prefill, first, refused, refused, inside, inside, accepted, inside)
    assert places([1, 4, 1]) == (prefill, first, inside, inside, inside, accepted)


@pytest.mark.parametrize("verify", ["auto", "coupled", "rejection"])
def test_every_way_of_accepting_is_proved_whatever_the_configuration_names(verify):
    subject = Subject(LLM(model_dir(), model_dir("near"), SpeculativeConfig(verify=verify), device=DEVICE))
    modes = [subject.sequences("a", PARAMS, how)[0].mode for how in (subject.rejection, "coupled")]
    assert modes == [Mode.REJECTION, Mode.COUPLED]
