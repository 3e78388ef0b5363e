"""From measurements to a verdict: is a draft worth having here? A function of what was found, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..runtime.sequence import Mode
from .found import Draft, Gain, Scenario, policy_name

LEAST_GAIN = 1.05
PRICE = 0.25  # a draft of the target's size must gain so much more: it takes its memory, all the time
SMALLEST, LARGEST = 1 / 20, 1 / 10  # of the target's parameters, by the rule
AGREES = 0.5
SHORT, MOSTLY = 16, 0.5  # tokens; share of the time before first tokens


@dataclass(frozen=True)
class Reason:
    """favours: True speaks for drafting, False against it, None for neither."""

    topic: str
    favours: bool | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """adopted: which of the drafts, and with which policy; None: decode natively. gain: what is expected."""

    adopted: int | None
    policy: str | None
    gain: Gain | None
    reasons: tuple[Reason, ...]


def needed(parameters: int, draft: Draft) -> float:
    """Times as fast as native decoding that a draft must be to be worth its memory."""
    return LEAST_GAIN + PRICE * draft.parameters / parameters


def decide(scenario: Scenario, drafts: Seq[Draft]) -> Verdict:
    """The draft that gains most, of those that gain enough and surely; reasons are about it, or about the best."""
    worth = [i for i, draft in enumerate(drafts) if _pays(scenario, draft)]
    ranked = worth or range(len(drafts))
    at = max(ranked, key=lambda i: (_gain(drafts[i]) or Gain(0, 0, 0)).times)
    draft = drafts[at]
    reasons = [*_scenario(scenario), *_fit(drafts), *(_pair(scenario, draft) if draft.unfit is None else ())]
    if not worth:
        return Verdict(None, None, _gain(draft), tuple(reasons))
    assert draft.best is not None
    return Verdict(at, draft.best.policy, _gain(draft), tuple(reasons))


def _gain(draft: Draft) -> Gain | None:
    """What was measured again, where it was; the best of many rungs is partly the luckiest."""
    return draft.confirmed or (None if draft.best is None else draft.best.gain)


def _pays(scenario: Scenario, draft: Draft) -> bool:
    gain = draft.confirmed
    return gain is not None and gain.low > 1 and gain.times >= needed(scenario.parameters, draft)


def _scenario(found: Scenario) -> Iterator[Reason]:
    many = found.together > 1
    yield Reason(
        "scenario",
        None,
        f"{found.together} request{'s' if many else ''} at a time on {found.device}"
        + (": a round's rows are shared by all of them, and drafts add to them" if many else ""),
    )
    short = found.output_tokens < SHORT or found.prefill > MOSTLY
    yield Reason(
        "output length",
        False if short else None,
        f"{found.output_tokens:.0f} tokens after prompts of {found.prompt_tokens:.0f}; {found.prefill:.0%} of native "
        f"decoding's time is before the first token, which no draft shortens, so at most {_most(found.prefill)} times",
    )
    how = {
        Mode.GREEDY: "greedy: a draft's token counts where it is the target's likeliest",
        Mode.COUPLED: "seeded: a draft's token counts where the same noise gives the target the same one",
        Mode.REJECTION: "sampled: a draft's token is kept with the share of probability that both give it",
    }[found.mode]
    yield Reason("temperature", None, f"{found.temperature:g}, {how}")


def _most(prefill: float) -> str:
    return f"{1 / prefill:.1f}" if prefill > 0.01 else "100"


def _fit(drafts: Seq[Draft]) -> Iterator[Reason]:
    if any(draft.unfit is None for draft in drafts):
        names = ", ".join(draft.name for draft in drafts if draft.unfit is None)
        yield Reason("tokenizer", True, f"{names}: the target's tokens")
    for draft in drafts:
        if draft.unfit is not None:
            yield Reason(draft.unfit.topic, False, draft.unfit.why)


def _pair(scenario: Scenario, draft: Draft) -> Iterator[Reason]:
    if draft.best is not None:
        more = draft.best.memory - scenario.memory
        yield Reason(
            "memory",
            True,
            f"{_mib(more)} more than native decoding's {_mib(scenario.memory)}; {_mib(scenario.free)} free",
        )
    for policy, why in (draft.left_out or {}).items():
        yield Reason("memory", False, f"{policy_name(policy)} was not tried: {why}")
    share = draft.parameters / scenario.parameters
    fits = SMALLEST <= share <= LARGEST * 1.05  # a tenth, rounded
    cost = "" if draft.cost is None else f", and its pass takes {draft.cost:.2f} of the target's time"
    yield Reason(
        "draft size",
        True if fits else False if share > LARGEST else None,
        f"{draft.name} has {share:.3f} of the target's parameters{cost}; the rule is a tenth to a twentieth",
    )
    if draft.agreement is not None:
        agrees = draft.agreement >= AGREES
        yield Reason(
            "agreement", agrees, f"{draft.agreement:.2f} of its tokens are kept; the rule is at least {AGREES}"
        )
    if (gain := _gain(draft)) is not None and draft.best is not None:
        least = needed(scenario.parameters, draft)
        said = f"{policy_name(draft.best.policy)} is {gain.times:.2f} times as fast [{gain.low:.2f}, {gain.high:.2f}]"
        again = "measured again" if draft.confirmed else "the best rung"
        yield Reason(
            "expected gain",
            _pays(scenario, draft),
            f"{said}, {again}; worth its memory from {least:.2f} on, surely above 1",
        )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
