"""Measuring: native decoding first, then each draft's ladder beside it, then the best rung once more by itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import fmean

from ..models.size import num_parameters
from ..runtime.alternate import AUTO, NATIVE, Sample, alternate, draft_share, fields_of, totals
from ..runtime.checks import ParameterError
from ..runtime.config import SpeculativeConfig, Verify
from ..runtime.llm import LLM
from ..runtime.memory_plan import MemoryPlan
from ..runtime.requests import Prompt
from ..runtime.sampling_params import SamplingParams
from .found import Draft, Gain, Rung, Scenario, agreement, least_seconds

CHAINS = ("4", "8", "16", "32")
TREES = ("4,2,1,1", "2,2,1,1,1,1,1,1", ",".join(["2"] + ["1"] * 15), ",".join(["2"] + ["1"] * 31))  # as deep
RUNGS = (*CHAINS, *TREES, "window", AUTO)
FEW, LEAST = 2, 3  # groups on which all rungs are tried; and on which the better ones are, however long it takes
TOO_SLOW = 2.0  # times native decoding's time there: such a rung is not tried on the others
LOOK_RUNS, LOOK_TOKENS = 2, 48  # the first lowers programs
LOOK_COST, FULL_COST = 30, 10  # native passes that the look takes where nothing is accepted, and a run of what is left


@dataclass(frozen=True)
class Work:
    """Groups of prompts that run together, and each prompt's parameters. longest: tokens of a text, prompt included."""

    groups: tuple[tuple[Prompt, ...], ...]
    params: tuple[tuple[SamplingParams, ...], ...]
    longest: int
    temperature: float

    @property
    def together(self) -> int:
        return len(self.groups[0])

    def first(self, number: int, tokens: int | None = None) -> Work:
        """Of some groups, evenly spaced; texts have so many `tokens` at most."""
        kept = [i * len(self.groups) // number for i in range(number)]
        params = (
            tuple(replace(p, max_tokens=min(p.max_tokens, tokens or p.max_tokens)) for p in self.params[i])
            for i in kept
        )
        return replace(self, groups=tuple(self.groups[i] for i in kept), params=tuple(params))


def natively(llm: LLM, groups: Seq[Seq[Prompt]], params: SamplingParams, verify: Verify) -> tuple[Work, Scenario]:
    """Work in which each prompt's text is as long as it is natively, and how that went. `llm` has no draft.

    verify: how drafts will be accepted.
    """
    llm.warm_up(params)
    both = alternate(llm, groups, params, (NATIVE,), LOOK_RUNS, "native", first=0)
    samples = [min(of_group, key=lambda sample: sample.seconds) for of_group in zip(*_runs(both), strict=True)]
    stats = [one for sample in samples for one in sample.requests]
    own = tuple(
        tuple(replace(params, max_tokens=max(1, one.emitted), min_tokens=0, ignore_eos=True) for one in sample.requests)
        for sample in samples
    )
    longest = max(one.prompt_tokens + one.emitted for one in stats)
    work = Work(tuple(map(tuple, groups)), own, longest, params.temperature)
    plan = llm.memory_plan(native=True)
    seconds = sum(sample.seconds for sample in samples)
    first = sum(max(one.ttft_s or 0.0 for one in sample.requests) for sample in samples)
    return work, Scenario(
        device=str(llm.device),
        together=work.together,
        num_prompts=len(stats),
        prompt_tokens=fmean(one.prompt_tokens for one in stats),
        output_tokens=fmean(one.emitted for one in stats),
        seconds=seconds,
        prefill=first / seconds,
        temperature=params.temperature,
        mode=replace(llm.maker, verify=verify).mode(params),
        parameters=num_parameters(llm.target.config),
        memory=plan_bytes(plan, work, 1),
        free=plan.free,
    )


def affordable(num_groups: int, native: float, runs: int, budget: float) -> int:
    """How many groups a ladder can complete in `budget` seconds, where native decoding takes `native` for all."""
    each = native / num_groups
    left = budget / each - LOOK_COST * min(FEW, num_groups)
    return min(num_groups, max(LEAST, int(left / (FULL_COST * runs))))


def climb(llm: LLM, work: Work, runs: int, name: str) -> Draft:
    """The ladder of a pair whose controller is `auto`; every rung beside native decoding, in the same runs."""
    assert llm.draft is not None
    for native in (False, True):
        llm.warm_up(work.params[0][0], native=native)
    cost, memory, left_out = draft_share(llm), dict[str, int](), dict[str, str]()
    for policy in RUNGS:
        found = _memory(llm, policy, work)
        if isinstance(found, int):
            memory[policy] = found
        else:
            left_out[policy] = found
    look, tried = work.first(min(FEW, len(work.groups)), LOOK_TOKENS), (NATIVE, *memory)
    first = _by(alternate(llm, look.groups, look.params, tried, LOOK_RUNS, f"{name}: all rungs", first=0))
    kept = [policy for policy in tried if Gain.of(first[NATIVE], first[policy]).times * TOO_SLOW >= 1]
    better = _by(alternate(llm, work.groups, work.params, kept, runs, f"{name}: {len(kept)} rungs", first=0))
    seconds = least_seconds(better[NATIVE])
    rungs = []
    for policy, held in memory.items():
        samples = better if policy in better else first
        gain, said = Gain.of(samples[NATIVE], samples[policy]), totals(samples[policy])
        figures = said["mean_emitted_per_round"], said["wasted_fraction"]
        rungs.append(Rung(policy, gain, seconds / gain.times, *figures, held, policy not in better))
    chains = [s for policy in CHAINS for s in (better.get(policy) or first.get(policy, []))]
    return Draft(
        name,
        num_parameters(llm.draft.config),
        cost=cost,
        agreement=agreement(chains),
        prompts=work.together * len(work.groups),
        native=seconds,
        rungs=tuple(rungs),
        left_out=left_out,
    )


def confirm(llm: LLM, work: Work, runs: int, name: str) -> Gain:
    """Of a pair as `run` makes it, with its own controller, beside native decoding."""
    for native in (False, True):
        llm.warm_up(work.params[0][0], native=native)
    samples = _by(alternate(llm, work.groups, work.params, (NATIVE, AUTO), 2 * runs, f"{name}: once more", first=0))
    return Gain.of(samples[NATIVE], samples[AUTO])


def config_of(policy: str, verify: str) -> SpeculativeConfig:
    """The configuration with which `run` has this policy."""
    return SpeculativeConfig.parse({**fields_of(policy), "verify": verify})


def plan_bytes(plan: MemoryPlan, work: Work, nodes: int) -> int:
    """Weights, activations at most, and the KV blocks of requests that run together."""
    blocks = work.together * -(-(work.longest + nodes) // plan.block_size)
    return sum(model.weights + model.arena + blocks * model.block for model in plan.models)


def _memory(llm: LLM, policy: str, work: Work) -> int | str:
    """Bytes that a rung holds, or why it cannot have them."""
    config = config_of(policy, llm.speculative_config.verify)
    try:
        plan = llm.memory_plan(config=config)
    except ParameterError as error:
        return str(error)
    found = plan_bytes(plan, work, _nodes(config))
    if (more := found - sum(model.weights for model in plan.models)) <= plan.free:
        return found
    return f"{more / 2**20:,.0f} MiB beside the weights, and {plan.free / 2**20:,.0f} MiB are free"


def _nodes(config: SpeculativeConfig) -> int:
    """Most that a round drafts."""
    shape = config.shape
    return config.max_draft_len if shape == "chain" else config.budget if shape == "auto" else shape.num_nodes - 1


def _runs(samples: Seq[Sample]) -> list[list[Sample]]:
    """Of each run, its groups in their order."""
    return [[sample for sample in samples if sample.run == run] for run in range(1 + max(s.run for s in samples))]


def _by(samples: Seq[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.policy, []).append(sample)
    return found
