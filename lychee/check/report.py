"""What a check found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..nouns import counted
from ..runtime.sampling_params import SamplingParams
from .chi_square import ChiSquare
from .proofs import NUM_SEEDS, Plan, Results, Tried
from .sampled import SIGNIFICANCE, Sampled
from .samples import LENGTH
from .tokens import Difference, Equality

DOUBLINGS = (2, 4, 8, 16)  # of samples, that are advised
SHOWN = 5  # differences of a proof that are listed
LEAST_TOKENS = 3  # the prefill's token, one that may be drafted, and one after it: fewer, and no round drafts


def table(plan: Plan, results: Results) -> Table:
    """A row for each proof and each control."""
    made = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        made.add_column()
    prompts, sampling = counted(len(plan.prompts), "prompt"), described(plan.sampling)
    once = f"{prompts}, alone and as one batch"
    seeds = f"{prompts} with {NUM_SEEDS} seeds, alone and as one batch, {sampling}"
    made.add_row("greedy", _verdict(results.greedy.passed), _equality(results.greedy, once))
    made.add_row("coupled", _verdict(results.coupled.passed), _equality(results.coupled, seeds))
    made.add_row("sampled", _verdict(results.sampled.passed), _sampled(results.sampled, sampling))
    for tried in results.controls:
        made.add_row("control", "caught" if tried.caught else "NOT CAUGHT", _tried(tried))
    return made


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def described(params: SamplingParams) -> str:
    parts = [f"temperature {params.temperature:g}"]
    if params.top_k > 0:
        parts.append(f"top-k {params.top_k}")
    if params.top_p < 1:
        parts.append(f"top-p {params.top_p:g}")
    if params.min_p > 0:
        parts.append(f"min-p {params.min_p:g}")
    return ", ".join(parts)


def _equality(found: Equality, what: str) -> str:
    if not found.differences:
        return f"{what}: the {counted(found.num_tokens, 'token')} of native decoding"
    ties = sum(difference.near_tie for difference in found.differences)
    near = f", {ties} of them at near ties" if ties else ""
    return f"{what}: {counted(len(found.differences), 'text')} with other tokens than native decoding's{near}"


def _sampled(found: Sampled, sampling: str) -> str:
    samples, prompts = counted(found.num_samples, "sample"), counted(found.num_prompts, "prompt")
    return (
        f"{samples} of {LENGTH} tokens after {prompts}, {sampling}: "
        f"against native decoding's exact probabilities: p = {found.p_value:.2g}, fails below {SIGNIFICANCE:g}"
    )


def _tried(tried: Tried) -> str:
    what, found = f"{tried.control.what}: {tried.proof}", tried.found
    if isinstance(found, Sampled):
        return f"{what} has p = {found.p_value:.2g} after {counted(found.num_samples, 'sample')}"
    if not found.differences:
        return f"{what} finds no difference"
    first = found.differences[0]
    return f"{what} differs at prompt {first.prompt}, token {first.position}"


def details(results: Results, named: Callable[[int], str]) -> Iterator[str]:
    """What failed and where, a line each. named: a token id as text."""
    for name, found in (("greedy", results.greedy), ("coupled", results.coupled)):
        for difference in found.differences[:SHOWN]:
            yield f"{name}: {_difference(difference, named)}"
        if len(found.differences) > SHOWN:
            yield f"{name}: {counted(len(found.differences) - SHOWN, 'more difference')}"
    if not results.sampled.passed:
        for name, test in results.sampled.evidence.tests.items():
            yield f"sampled: {name.replace('_', ' ')}: {_chi_square(test)}"


def _difference(at: Difference, named: Callable[[int], str]) -> str:
    def token(number: int | None) -> str:
        return "the end" if number is None else f"{number} {named(number)!r}"

    seed = "" if at.seed is None else f", seed {at.seed}"
    where = f"prompt {at.prompt}{seed}, {'in the batch' if at.together else 'alone'}"
    margin = "" if at.margin is None else f"; margin {at.margin:.3g} in native decoding, allowed {at.allowed:.3g}"
    return f"{where}: token {at.position} is {token(at.speculative)}, native {token(at.native)}{margin}"


def _chi_square(found: ChiSquare) -> str:
    if found.p_value == 0 and found.freedom == 1:
        return "a token was emitted that has no probability"
    return f"chi-square {found.statistic:.0f} at {found.freedom} degrees of freedom, p = {found.p_value:.2g}"


def advice(plan: Plan, results: Results) -> Iterator[str]:
    """For each proof that did not catch a control, what would let it."""
    for name in dict.fromkeys(tried.proof for tried in results.controls if not tried.caught):
        drafting = results.drafting[name]
        if not drafting.drafted and name != "sampled" and plan.sampling.max_tokens < LEAST_TOKENS:
            why = f"--max-tokens {plan.sampling.max_tokens} leaves no round to draft in: give {LEAST_TOKENS} or more"
        elif not drafting.drafted:
            why = "nothing was drafted: prompts must leave the draft room for more tokens in its context"
        elif drafting.drafted == drafting.accepted:
            why = (
                f"all {drafting.drafted} drafted tokens were accepted, as of a draft that is the target, and no fault "
                "in refusing can show: give another --draft-model, or one rounded otherwise (--draft-quant int4)"
            )
        else:
            refused = 1 - drafting.accepted / drafting.drafted
            missed = [tried.found for tried in results.controls if tried.proof == name and not tried.caught]
            enough = max((_enough(plan, found) for found in missed if isinstance(found, Sampled)), default=0)
            more = f"--samples {enough}" if enough else "more --max-tokens, more prompts (--prompt-file)"
            why = (
                f"{refused:.0%} of {drafting.drafted} drafted tokens were refused; give {more}, or a higher "
                "--temperature, at which more are"
            )
        yield f"{name}: {why}"


def _enough(plan: Plan, found: Sampled) -> int:
    """Samples of each prompt that are likely to catch what these did not, in doublings."""
    likely = (times for times in DOUBLINGS if found.evidence.p_value_of_more(times) < SIGNIFICANCE / 10)
    return plan.num_samples * next(likely, DOUBLINGS[-1])


def summary(results: Results, lossy: bool, seconds: float) -> str:
    """The last line."""
    caught = sum(tried.caught for tried in results.controls)
    controls = f"{caught} of {len(results.controls)} controls caught"
    if not results.lossless:
        names = [name for name in ("greedy", "coupled", "sampled") if not getattr(results, name).passed]
        why = "; fallback_sampling is false, which is lossy" if lossy else ""
        return f"NOT LOSSLESS: {', '.join(names)} failed{why}; {controls}; {seconds:.0f} s"
    if not results.powerful:
        return f"NO POWER: the proofs passed, but {controls}, so they would not see every fault here; {seconds:.0f} s"
    return (
        f"passed: 3 of 3 proofs, {controls}; {seconds:.0f} s. Of seeds, {SIGNIFICANCE:.1%} fail the sampled proof of a "
        "lossless pair"
    )


def as_json(plan: Plan, results: Results, subject: dict[str, Any], seconds: float) -> dict[str, Any]:
    """subject: what was checked, under its own names."""

    def of(found: Equality | Sampled) -> dict[str, Any]:
        if isinstance(found, Equality):
            differences = [{**asdict(d), "near_tie": d.near_tie} for d in found.differences]
            return {"num_tokens": found.num_tokens, "differences": differences}
        tests = {
            name: {"statistic": min(test.statistic, 1e300), "freedom": test.freedom, "p_value": test.p_value}
            for name, test in found.evidence.tests.items()
        }
        return {
            "num_prompts": found.num_prompts,
            "num_samples": found.num_samples,
            "p_value": found.p_value,
            "tests": tests,
        }

    return {
        "passed": results.lossless and results.powerful,
        **subject,
        "sampling": {name: getattr(plan.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
        "num_prompts": len(plan.prompts),
        "max_tokens": plan.sampling.max_tokens,
        "significance": SIGNIFICANCE,
        "proofs": {
            name: {
                "passed": getattr(results, name).passed,
                **asdict(results.drafting[name]),
                **of(getattr(results, name)),
            }
            for name in ("greedy", "coupled", "sampled")
        },
        "controls": [
            {"what": t.control.what, "proof": t.proof, "caught": t.caught, **of(t.found)} for t in results.controls
        ],
        "seconds": seconds,
    }
