"""`lychee tune`: right verdicts on measurements, and on real pairs under a clock that counts what passes cost."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lychee import __main__, run, tune
from lychee.models.size import num_parameters
from lychee.runtime import alternate as alternating
from lychee.runtime.alternate import Sample
from lychee.runtime.metrics import RequestStats
from lychee.runtime.sequence import Mode
from lychee.tune import candidates, ladder
from lychee.tune.found import Draft, Gain, Rung, Scenario, Unfit, agreement
from lychee.tune.verdict import decide, needed
from tests.factory import make_model_dir
from tests.runtime.pairs import PROMPTS, model_dir

MIB = 1 << 20
SCENARIO = Scenario("cpu", 1, 8, 30.0, 128.0, 2.0, 0.05, 0.0, Mode.GREEDY, 1000, 100 * MIB, 1000 * MIB)
FEW_RUNGS = ("4", "8", "2,1")


def drafted(gain=2.0, low=None, share=0.1, agreement=0.7, confirmed=True, name="draft", **more):
    found = Gain(gain, gain - 0.02 if low is None else low, gain + 0.02)
    rung = Rung("4", found, 1.0, 3.0, 0.4, 110 * MIB)
    again = found if confirmed else None
    return Draft(name, round(1000 * share), None, 0.1, agreement, 8, 2.0, (rung,), {}, again, **more)


def favours(verdict):
    return {reason.topic: reason.favours for reason in verdict.reasons}


# the verdict


def test_a_good_pair_is_adopted_with_every_reason_given():
    verdict = decide(SCENARIO, [drafted()])
    assert (verdict.adopted, verdict.policy, verdict.gain) == (0, "4", drafted().confirmed)
    assert favours(verdict) == {
        "scenario": None, "output length": None, "temperature": None, "tokenizer": True, "memory": True,
        "draft size": True, "agreement": True, "expected gain": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("draft", "topic"),
    [
        (drafted(gain=0.5, agreement=0.01, confirmed=False), "agreement"),
        (drafted(gain=1.1, share=1.0), "draft size"),
        (drafted(gain=1.02), "expected gain"),
        (drafted(gain=1.5, low=0.9), "expected gain"),
        (drafted(gain=1.5, confirmed=False), "expected gain"),
        (Draft("draft", 100, Unfit("tokenizer", "token 7 differs")), "tokenizer"),
        (Draft("draft", 100, Unfit("memory", "weights take more than there is")), "memory"),
    ],
)
def test_what_does_not_pay_is_not_adopted_and_the_reason_said(draft, topic):
    verdict = decide(SCENARIO, [draft])
    assert (verdict.adopted, verdict.policy) == (None, None)
    assert favours(verdict)[topic] is False


def test_of_several_drafts_the_one_that_gains_most_is_adopted():
    drafts = [drafted(1.3, name="a"), drafted(1.8, name="b"), drafted(2.5, low=0.9, name="c"), drafted(1.5, name="d")]
    assert decide(SCENARIO, drafts).adopted == 1


def test_short_outputs_speak_against_drafting():
    assert favours(decide(replace(SCENARIO, output_tokens=5.0), [drafted()]))["output length"] is False
    assert favours(decide(replace(SCENARIO, prefill=0.7), [drafted()]))["output length"] is False


def test_a_rung_that_does_not_fit_in_memory_is_told():
    verdict = decide(SCENARIO, [replace(drafted(), left_out={"32": "900 MiB beside the weights"})])
    assert any("chain of 32 was not tried: 900 MiB" in reason.text for reason in verdict.reasons)


gains = st.builds(
    lambda times, down, up: Gain(times, times - down, times + up),
    st.floats(0.1, 5), st.floats(0, 0.09), st.floats(0, 1),
)  # fmt: skip
drafts = st.builds(
    lambda gain, share, agreed, sure: replace(drafted(share=share, agreement=agreed), confirmed=gain if sure else None),
    gains, st.floats(0.01, 2), st.floats(0, 1), st.booleans(),
)  # fmt: skip


@given(st.lists(drafts, min_size=1, max_size=4))
def test_only_a_sure_and_sufficient_gain_is_adopted_and_more_gain_never_loses(some):
    verdict = decide(SCENARIO, some)
    sufficient = [
        d.confirmed is not None and d.confirmed.low > 1 and d.confirmed.times >= needed(1000, d) for d in some
    ]
    assert (verdict.adopted is not None) == any(sufficient)
    if verdict.adopted is not None:
        won = some[verdict.adopted]
        assert sufficient[verdict.adopted]
        better = Gain(won.confirmed.times + 1, won.confirmed.low + 1, won.confirmed.high + 1)
        some = [replace(d, confirmed=better) if d is won else d for d in some]
        assert some[decide(SCENARIO, some).adopted] == replace(won, confirmed=better)


# what it is made of


def samples(seconds, policy="4", tokens=10):
    """Of seconds[run][group]."""
    stats = (RequestStats(emitted=tokens),)
    return [Sample(policy, r, g, s, (), stats) for r, row in enumerate(seconds) for g, s in enumerate(row)]


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.2, 5))
def test_a_rung_of_constant_speed_has_that_gain(seconds, factor):
    own = [[s / factor for s in row] for row in seconds]
    gain = Gain.of(samples(seconds), samples(own))
    assert gain.times == pytest.approx(factor)
    assert gain.low <= gain.times * (1 + 1e-9)
    assert gain.high >= gain.times * (1 - 1e-9)


def test_a_machine_that_stops_for_a_while_changes_no_gain():
    native, own = [[2.0, 4.0], [2.0, 4.0], [2.0, 4.0]], [[1.0, 2.0], [500.0, 2.0], [1.0, 2.0]]
    assert Gain.of(samples(native), samples(own)).times == pytest.approx(2.0)


def test_a_gain_is_for_as_many_tokens():
    assert Gain.of(samples([[2.0]], tokens=10), samples([[2.0]], tokens=20)).times == pytest.approx(2.0)


def test_agreement_leaves_out_what_the_target_never_came_to():
    stats = RequestStats()
    shape = alternating.make_controller(alternating.SpeculativeConfig(num_speculative_tokens=4)).shape
    stats.add_round(shape, (0, 1, 2), 3, False)  # two kept, the third refused, the fourth never looked at
    stats.add_round(shape, (0, 1, 2, 3, 4), 5, False)
    assert agreement([Sample("4", 0, 0, 1.0, (), (stats,))]) == pytest.approx(6 / 7)
    assert agreement([]) is None


def test_fewer_prompts_are_taken_where_native_decoding_is_slow():
    assert ladder.affordable(12, 0.5, 3, 60.0) == 12
    assert 1 < ladder.affordable(12, 2.5, 3, 60.0) < 12
    assert ladder.affordable(12, 1e4, 3, 60.0) == ladder.LEAST
    assert ladder.affordable(2, 1e4, 3, 60.0) == 2


def test_parameters_are_those_of_the_files():
    from safetensors.torch import load_file

    config = candidates.opened("model_quant", model_dir(), None, None).config
    assert num_parameters(config) == sum(w.numel() for w in load_file(model_dir() / "model.safetensors").values())


# real pairs


@pytest.fixture(scope="module")
def good_draft(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("tune") / "good", noise_of=model_dir(), noise=0.02)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("tune") / "prompts"
    file.write_text("\n".join(PROMPTS))
    return file


@pytest.fixture
def counted(monkeypatch):
    """Samples' seconds are counted: a pass of the target is 1 and 0.02 a row, one of the draft `draft`."""
    real, costs = alternating.alternate, {"draft": 0.1, "order": []}

    def timed(llm, groups, params, policies, runs, label="", first=-1):
        found = real(llm, groups, params, policies, 1, label, first=0)
        costs["order"].append(tuple(policies))
        return [replace(s, run=run, seconds=sum(map(seconds, s.requests))) for run in range(runs) for s in found]

    def seconds(stats):
        levels = sum(stats.drafted_at)
        return 1 + stats.rounds + 0.02 * (stats.rounds + stats.drafted) + costs["draft"] * levels

    monkeypatch.setattr(ladder, "alternate", timed)
    monkeypatch.setattr(ladder, "RUNGS", FEW_RUNGS)
    return costs


@pytest.fixture
def tuned(prompt_file, tmp_path, capsys):
    def call(*drafts, model="T", more=()):
        file = tmp_path / "tuned.json"
        named = [part for draft in drafts for part in ("--draft-model", str(draft))]
        options = [
            "--prompt-file",
            str(prompt_file),
            "--max-tokens",
            "24",
            "--seconds",
            "1e6",
            "--json",
            str(file),
            *map(str, more),
        ]
        code = tune.main([str(model_dir(model)), *named, *options])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err, json.loads(file.read_text()) if file.exists() else None

    return call


def test_a_pair_that_agrees_is_adopted_and_run_reproduces_it(counted, tuned, good_draft, prompt_file, tmp_path, capsys):
    code, out, _, found = tuned(good_draft, model_dir("far"))
    assert code == 0
    assert counted["order"][0] == ("native",)  # before anything is drafted
    good, bad = found["found"]["drafts"]
    assert found["draft"]["name"] == str(good_draft)
    assert good["agreement"] > 0.5 > 0.1 > bad["agreement"]
    assert good["confirmed"]["times"] == pytest.approx(max(r["gain"]["times"] for r in good["rungs"]))
    assert {rung["policy"] for rung in good["rungs"]} == set(FEW_RUNGS)
    assert "verdict: adopt good here, chain of" in out
    report = tmp_path / "report.json"
    argv = ["--tuned", tmp_path / "tuned.json", "--prompt-file", prompt_file, "--max-tokens", 24, "--report", report]
    assert run.main([*map(str, argv)]) == 0
    totals = json.loads(report.read_text())["runs"]["speculative"]["totals"]
    rung = next(rung for rung in good["rungs"] if rung["policy"] == found["found"]["verdict"]["policy"])
    assert totals["mean_emitted_per_round"] == pytest.approx(rung["emitted"])
    assert totals["wasted_fraction"] == pytest.approx(rung["wasted"])
    capsys.readouterr()


def test_a_draft_that_never_agrees_is_not_adopted(counted, tuned):
    code, out, _, found = tuned(model_dir("far"))
    assert (code, found["draft"]) == (0, None)
    assert "do not adopt a draft here" in out
    assert favours_of(found)["agreement"] is False


def test_a_draft_as_large_as_its_target_is_not_adopted(counted, tuned):
    counted["draft"] = 1.0
    code, _, _, found = tuned(model_dir("same"))
    assert (code, found["draft"]) == (0, None)
    assert found["found"]["drafts"][0]["agreement"] == 1.0
    assert favours_of(found)["draft size"] is False


def favours_of(found):
    return {reason["topic"]: reason["favours"] for reason in found["found"]["verdict"]["reasons"]}


def test_tokenizers_that_differ_are_told_and_other_drafts_measured(counted, tuned, good_draft):
    code, out, _, found = tuned(model_dir("near", "bpe"), good_draft)
    assert (code, found["draft"]["name"]) == (0, str(good_draft))
    assert "does not fit the model: draft tokenizer has" in out
    assert found["found"]["drafts"][0]["unfit"]["topic"] == "tokenizer"


def test_what_does_not_fit_memory_is_told(counted, tuned, monkeypatch, tmp_path):
    size = candidates.Candidate.of(str(model_dir()), model_dir(), "target", None, None).bytes
    monkeypatch.setattr(candidates, "free_memory", lambda device: int(1.5 * size))
    code, out, _, found = tuned(model_dir("near"))
    assert (code, found["draft"]) == (0, None)
    assert "sentencepiece-near does not fit beside the target: weights take" in out
    monkeypatch.setattr(candidates, "free_memory", lambda device: size - 1)
    (tmp_path / "tuned.json").unlink()
    code, _, err, found = tuned(model_dir("near"))
    assert (code, found) == (2, None)
    assert "does not fit in memory: weights take" in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "no --draft-model: there is nothing to tune"),
        (["--draft-model", "/no/where", "--prompt", "a"], "draft_model is '/no/where', must be a model directory"),
        (["--draft-model", "T", "--batch-size", "0"], "--batch-size is 0"),
        (["--draft-model", "T", "--runs", "0"], "--runs is 0"),
        (["--draft-model", "T", "--seconds", "0"], "--seconds is 0"),
        (["--draft-model", "T", "--json", "/no/where/x.json"], "--json is /no/where/x.json"),
        (["--draft-model", "T", "--system", "x"], "--system needs --chat"),
        (["--draft-model", "T", "--prompt", "a " * 300], "must leave room below max_model_len"),
        (["--draft-model", "T", "--draft-quant", "int3", "--prompt", "a"], "draft_quant is 'int3'"),
        (["--draft-model", "T"], "no prompts: give --prompt-file or --prompt"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(options, sentence, capsys):
    given = [str(model_dir()) if part == "T" else part for part in options]
    assert __main__.main(["tune", str(model_dir()), *given]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
