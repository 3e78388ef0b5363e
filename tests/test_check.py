"""`lychee check`: a sound pair passes, broken builds fail in the proof that concerns them, bad input is refused."""

import json
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lychee import __main__, check
from lychee.check import controls, report
from lychee.check.chi_square import ChiSquare
from lychee.check.evidence import Evidence
from lychee.check.proofs import Plan, num_steps, prove
from lychee.check.sampled import Sampled
from lychee.check.subject import Subject
from lychee.check.tokens import Difference, TokenProof
from lychee.runtime import verifier
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.inputs import SamplingBatch
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.verifier import Verifier
from tests.conftest import DEVICE
from tests.factory import make_model_dir

PROMPTS = ["Hello world", "The quick brown fox"]
OPTIONS = ["--num-speculative-tokens", 2, "--samples", 32, "--max-tokens", 12, "--temperature", 0.8, "--top-k", 3]
FEW = ["--samples", 4]
ONE = ["--prompt", PROMPTS[0]]
WITHIN_BATCH = "in the batch"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("check")
    target = make_model_dir(root / "target", seed=3)
    (root / "prompts").write_text("\n".join(PROMPTS))
    return target, make_model_dir(root / "draft", noise_of=target, noise=0.15, seed=4), root / "prompts"


@pytest.fixture
def checked(pair, capsys, tmp_path):
    """Runs the command on the pair; returns its exit code, standard output in one line, standard error and JSON."""

    def call(*options, given=OPTIONS, draft=pair[1], source=("--prompt-file", pair[2])):
        file = tmp_path / "found.json"
        argv = [pair[0], "--draft-model", draft, *source, *given, *options, "--json", file]
        code = check.main([*map(str, argv)])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err, json.loads(file.read_text()) if file.exists() else None

    return call


def verdicts(found):
    """Which proofs passed, in the order greedy, coupled, sampled; whether each control was caught."""
    return [p["passed"] for p in found["proofs"].values()], [c["caught"] for c in found["controls"]]


def test_a_sound_pair_passes_and_every_control_is_caught(checked):
    code, out, err, found = checked()
    assert (code, err) == (0, "")
    assert verdicts(found) == ([True] * 3, [True] * 5)
    assert found["passed"]
    assert out.count("passed") == 4  # three proofs and the summary
    assert out.count("caught") == 6  # five controls and the summary
    for line in (
        "greedy passed 2 prompts",
        "coupled passed 2 prompts with 3 seeds",
        "sampled passed 64 samples of 96 tokens after 2 prompts",
    ):
        assert line in out
    assert "passed: 3 of 3 proofs, 5 of 5 controls caught" in out
    assert found["proofs"]["sampled"]["p_value"] > found["significance"] == 1e-3
    assert found["speculative_config"]["num_speculative_tokens"] == 2
    assert (found["dtype"], found["accepted_by"]) == ("float32", "traversal") or DEVICE != "cpu"
    assert "target" in found["model"]
    assert "draft" in found["draft_model"]


# broken builds


def test_an_emitted_draft_token_that_the_target_refused_fails_greedy_and_coupled(checked):
    run = Verifier.run

    def unverified(self, rows, proposals, sampling):
        logits, accepted = run(self, rows, proposals, sampling)
        tokens = tuple(
            (tree.tokens[1],) if len(path) == 1 and len(tree.tokens) > 1 and not reject else emitted
            for tree, path, emitted, reject in zip(
                proposals.trees, accepted.nodes, accepted.tokens, sampling.rejection, strict=True
            )
        )
        return logits, replace(accepted, tokens=tokens)

    with patch.object(Verifier, "run", unverified):
        code, out, _, found = checked(*FEW)
    assert code == 1
    assert verdicts(found)[0] == [False, False, True]
    assert "NOT LOSSLESS: greedy, coupled failed" in out
    assert "greedy: prompt 1, alone: token 2 is" in out
    (first, *_) = found["proofs"]["greedy"]["differences"]
    assert first["margin"] > first["allowed"] == 0 or DEVICE != "cpu"


def test_noise_that_depends_on_the_place_in_a_batch_fails_coupled_in_the_batch_alone(checked):
    keys, constants = SamplingBatch.keys, verifier._constants

    def moved(self, indices, positions, nodes):
        return keys(self, indices, positions, nodes + indices)

    def moved_constants(nodes, sampling):
        parents, depths, noise_nodes, *others = constants(nodes, sampling)
        return parents, depths, noise_nodes + nodes.layout.seq_idx, *others

    with patch.object(SamplingBatch, "keys", moved), patch.object(verifier, "_constants", moved_constants):
        code, out, _, found = checked(*FEW)
    assert code == 1
    assert verdicts(found)[0] == [True, False, True]
    assert "NOT LOSSLESS: coupled failed" in out
    assert WITHIN_BATCH in out
    assert all(difference["together"] for difference in found["proofs"]["coupled"]["differences"])


def drafts_greedily():
    propose = ModelDrafter.propose

    def greedily(self, batch, shapes, goes_on=None):
        return propose(self, replace(batch, greedy=np.ones_like(batch.greedy)), shapes, goes_on)

    return patch.object(ModelDrafter, "propose", greedily)


def forgets_the_round():
    keys = SamplingBatch.seq_keys

    def without_position(self):
        made = keys(self)
        return replace(made, root_positions=torch.zeros_like(made.root_positions))

    return patch.object(SamplingBatch, "seq_keys", without_position)


def accepts_everything():
    def accept(proposals, logits, batch, vocab, lossless):
        found = sound(proposals, logits, batch, vocab, lossless)
        if not all(batch.rejection):
            return found
        nodes = tuple(tuple(range(len(tree.tokens))) for tree in proposals.trees)
        tokens = tuple((*t.tokens[1:], e[-1]) for t, e in zip(proposals.trees, found.tokens, strict=True))
        return replace(found, nodes=nodes, rows=nodes, tokens=tokens)

    sound = verifier.accept
    return patch.object(verifier, "accept", accept)


@pytest.mark.parametrize(
    ("broken", "num_samples"),
    [
        (accepts_everything, 8),
        pytest.param(drafts_greedily, 8, marks=pytest.mark.slow),
        pytest.param(forgets_the_round, 32, marks=pytest.mark.slow),
    ],
)
def test_a_biased_build_fails_the_sampled_proof(checked, broken, num_samples):
    with broken():
        code, out, _, found = checked("--samples", num_samples)
    assert code == 1
    assert verdicts(found)[0] == [True, True, False]
    assert "sampled FAILED" in out
    assert "NOT LOSSLESS: sampled failed;" in out


def test_a_lossy_configuration_fails_and_is_named(checked):
    code, out, _, found = checked("--samples", 8, "--speculative-config", '{"fallback_sampling": false}')
    assert code == 1
    assert verdicts(found)[0] == [True, True, False]
    assert "NOT LOSSLESS: sampled failed; fallback_sampling is false, which is lossy" in out


# proofs that could not see a fault


def test_where_nothing_is_refused_the_check_has_no_power_and_says_so(checked, pair):
    code, out, _, found = checked(*FEW, draft=pair[0], source=ONE)
    assert code == 1
    assert verdicts(found)[0] == [True] * 3
    assert not any(verdicts(found)[1][:2])
    assert "NOT CAUGHT" in out
    assert "NO POWER" in out
    assert "drafted tokens were accepted, as of a draft that is the target" in out
    assert "give another --draft-model" in out


def test_where_no_round_drafts_the_check_names_the_tokens_that_one_needs(checked):
    code, out, _, _ = checked(*FEW, "--max-tokens", 1, source=ONE)
    assert code == 1
    assert "greedy: --max-tokens 1 leaves no round to draft in: give 3 or more" in out


@pytest.mark.parametrize(("statistic", "times"), [(10.2, 2), (6.0, 4), (0.5, 16)])
def test_samples_that_miss_a_fault_say_how_many_would_not(statistic, times):
    plan = Plan(((5, 6),), SamplingParams(seed=1), 12)
    missed = Sampled(1, 12, Evidence(ChiSquare(statistic, 1)))
    assert missed.passed
    assert report._enough(plan, missed) == 12 * times


def test_a_control_leaves_the_engine_as_it_was(pair):
    engine = LLM(*pair[:2], device=DEVICE).engine()
    sound = engine.drafter, engine.verifier
    for control in (controls.UNVERIFIED, *controls.OF_SAMPLES):
        with controls.broken(engine, control):
            assert (engine.drafter, engine.verifier) != sound
        assert (engine.drafter, engine.verifier) == sound


# differences


def test_a_difference_says_where_it_is_and_how_near_the_tie_was(pair):
    subject = Subject(LLM(*pair[:2], device=DEVICE))
    prompt = subject.llm.maker.sequences(PROMPTS[0], SamplingParams(), 0)[0].prompt
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=subject.llm.vocab, ignore_eos=True)
    (output,) = subject.llm.generate([prompt], params, native=True)
    right, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs[4].top
    second = sorted(logprobs, key=logprobs.get)[-2]
    proof = TokenProof(subject, (prompt,), (params,), (((*right[:4], second, *right[5:]),),))
    found = proof.run()
    assert not found.passed
    alone, together = found.differences
    assert (alone.position, alone.native, alone.speculative) == (5, second, right[4])
    assert (alone.together, together.together) == (False, True)
    assert alone.margin == pytest.approx(logprobs[second] - logprobs[right[4]], abs=1e-5)
    shorter = TokenProof(subject, (prompt,), (params,), ((right[:4],),)).catch().differences[0]
    assert (shorter.position, shorter.native, shorter.margin) == (5, None, None)


@pytest.mark.parametrize(
    ("margin", "allowed", "near"),
    [
        (0.0, 0.0, False),
        (1e-9, 0.0, False),
        (0.1, 0.25, True),
        (-0.1, 0.25, True),
        (0.3, 0.25, False),
        (None, 1.0, False),
    ],
)
def test_a_near_tie_is_allowed_only_where_rounding_may_differ(margin, allowed, near):
    assert Difference(1, None, False, 3, 5, 6, margin, allowed).near_tie == near


def test_a_seeds_margin_is_between_what_the_seed_drew_and_the_other(pair):
    """Native decoding's own token has the largest score, so its margin over any other is positive."""
    subject = Subject(LLM(*pair[:2], device=DEVICE))
    prompt = subject.llm.maker.sequences(PROMPTS[0], SamplingParams(), 0)[0].prompt
    params = SamplingParams(temperature=1.5, max_tokens=8, seed=3, ignore_eos=True)
    proof = TokenProof.of(subject, (prompt,), (params,))
    (native,) = proof.expected[0]
    for position in range(8):
        scores = proof._scores(0, params, native[:position])
        assert int(scores.argmax()) == native[position]


def test_proofs_use_some_prompts_of_all_of_the_list():
    prompts = tuple((i,) for i in range(30))
    assert Plan(prompts, SamplingParams(seed=1), 1).sampled == tuple((i,) for i in range(0, 30, 5))
    assert Plan(prompts[:1], SamplingParams(seed=1), 1).sampled == prompts[:1]


def test_steps_are_as_many_as_announced(pair):
    subject, steps = Subject(LLM(*pair[:2], device=DEVICE, max_num_seqs=64)), []
    plan = Plan(((5, 6, 7), (8, 9)), SamplingParams(seed=1, max_tokens=4, temperature=0.9), 4)
    prove(subject, plan, lambda: steps.append(1))
    assert len(steps) == num_steps(plan)


# bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperature", "0"], "--temperature is 0.0, must be at least 1e-5"),
        (["--samples", "0"], "--samples is 0, must be an integer of at least 1"),
        (["--max-tokens", "0"], "max_tokens is 0, must be an integer of at least 1"),
        (["--speculative-config", "{"], "speculative_config is not JSON"),
        (["--speculative-config", '{"trees": 1}'], "speculative_config has no 'trees'; did you mean tree?"),
        (["--prompt", ""], "prompt is '', must be text of at least one character"),
        (["--json", "nowhere/found.json"], "--json is nowhere/found.json, whose directory does not exist"),
        (["--max-draft-len", "0"], "max_draft_len is 0, must be at least 1: where nothing is drafted"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens is 0, must be at least 1: where nothing"),
        (["--speculative-config", '{"max_draft_len": 0}'], "max_draft_len is 0, must be at least 1"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(pair, capsys, options, sentence):
    assert check.main([str(pair[0]), "--draft-model", str(pair[1]), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lychee check: ")
    assert sentence in err


def test_a_model_without_a_draft_has_nothing_to_check(pair, capsys):
    assert check.main([str(pair[0])]) == 2
    assert "no --draft-model: there is no speculation to check" in capsys.readouterr().err


def test_prompts_that_fill_the_context_are_refused(pair, capsys, tmp_path):
    file = tmp_path / "long"
    file.write_text("lychee " * 400)
    argv = [str(pair[0]), "--draft-model", str(pair[1]), "--prompt-file", str(file)]
    assert check.main(argv) == 2
    assert "prompt" in capsys.readouterr().err


def test_it_is_a_command_of_lychee(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lychee", "check", "--samples", "none"])
    assert __main__.main() == 2
    assert "lychee check: argument --samples: invalid int value" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [2**63 - 3, 2**63 + 1, -(2**63) - 1])
def test_a_seed_without_room_for_those_that_follow_is_refused(pair, capsys, seed):
    argv = [str(pair[0]), "--draft-model", str(pair[1]), "--prompt", "a", "--seed", str(seed), "--samples", "300"]
    assert check.main(argv) == 2
    assert f"--seed is {seed}, must be in -2^63..2^63 - 5: the 4 that follow it are used too" in capsys.readouterr().err


def test_chains_are_drafted_unless_it_is_told_otherwise(checked):
    """Where `auto` drafts nothing there would be nothing to prove."""
    *_, found = checked(*FEW, "--max-tokens", 8, given=(), source=ONE)
    assert found["speculative_config"]["tree"] == "chain"
