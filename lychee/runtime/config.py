"""Configuration of speculation and of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from .sampling_params import ParameterError, check_float, check_int, refuse
from .tree import TreeShape, parse_tree

Verify = Literal["auto", "rejection", "traversal", "coupled"]
MAX_DRAFT_LEN = 32
MAX_NODES = 64
PLANNED_NODES = 32


@dataclass(frozen=True)
class SpeculativeConfig:
    """How a draft model is used.

    max_draft_len: most tokens drafted in a round, 0 to 32; 0 decodes natively.
    adaptive (alias adaptive_max_draft_len): choose the length per request and round from its recent acceptance;
        otherwise it is fixed.
    num_speculative_tokens: a fixed length; the same as max_draft_len=k with adaptive=False.
    acceptance_threshold: an adaptive length shrinks while the acceptance rate of recent rounds is below this.
    fallback_sampling: draw the token after a rejection from the residual distribution, which keeps the output
        distributed exactly as the target's. False draws it from the unmodified target distribution: lossy.
    verify: `rejection` and `traversal` keep the distribution; `coupled` draws draft and target with the request's own
        noise, so a seed gives the tokens of native decoding; `auto` is coupled for a request with a seed, traversal for
        others. At temperature 0 all are greedy.
    tree: `chain` drafts one token after another; children by depth, as in "4,2,2", draft that tree in every round; and
        `auto` plans chains, trees or none, whichever emits most per millisecond by the measured costs of rounds and
        each request's acceptance.
    node_budget: most nodes drafted in a round of a tree, 1 to 64 (default 64, with `auto` 32).
    """

    max_draft_len: int = 16
    adaptive: bool = True
    num_speculative_tokens: int | None = None
    acceptance_threshold: float = 0.4
    fallback_sampling: bool = True
    verify: Verify = "auto"
    tree: str = "chain"
    node_budget: int | None = None
    adaptive_max_draft_len: InitVar[bool | None] = None

    def __post_init__(self, adaptive_max_draft_len: bool | None) -> None:
        check_int("max_draft_len", self.max_draft_len, 0, MAX_DRAFT_LEN)
        if adaptive_max_draft_len is not None:
            object.__setattr__(self, "adaptive", adaptive_max_draft_len)
        if self.num_speculative_tokens is not None:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_LEN)
            if self.max_draft_len not in (type(self).max_draft_len, self.num_speculative_tokens):
                raise refuse("max_draft_len", self.max_draft_len, "left out where num_speculative_tokens is given")
            object.__setattr__(self, "max_draft_len", self.num_speculative_tokens)
            object.__setattr__(self, "adaptive", False)
        check_float("acceptance_threshold", self.acceptance_threshold, 0.0, 1.0)
        for name in ("adaptive", "fallback_sampling"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "true or false")
        if self.verify not in get_args(Verify):
            raise refuse("verify", self.verify, " or ".join(get_args(Verify)))
        self._check_tree()

    def _check_tree(self) -> None:
        """Refuse what a tree would ignore."""
        if self.node_budget is not None:
            check_int("node_budget", self.node_budget, 1, MAX_NODES)
        shape = self.shape
        if self.node_budget is not None and shape == "chain":
            raise refuse("node_budget", self.node_budget, "left out without a tree: max_draft_len limits a chain")
        given = "num_speculative_tokens" if self.num_speculative_tokens is not None else "max_draft_len"
        fixed = isinstance(shape, TreeShape)
        if (fixed and self.max_draft_len != type(self).max_draft_len) or (
            shape != "chain" and self.num_speculative_tokens is not None
        ):
            raise refuse(given, getattr(self, given), f"left out where tree is {self.tree!r}")

    @property
    def budget(self) -> int:
        """Most nodes drafted in a round of a tree."""
        return self.node_budget or (PLANNED_NODES if self.tree == "auto" else MAX_NODES)

    @property
    def shape(self) -> TreeShape | Literal["auto", "chain"]:
        """What `tree` says."""
        return parse_tree(self.tree, self.budget, MAX_DRAFT_LEN)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From a JSON object; an unknown key is refused."""
        allowed = {f.name for f in fields(cls)} | {"adaptive_max_draft_len"}
        for key in given:
            if key not in allowed:
                raise ParameterError(f"speculative_config has {key!r}, may have {', '.join(sorted(allowed))}")
        for key, same in (("num_speculative_tokens", "max_draft_len"), ("adaptive_max_draft_len", "adaptive")):
            if given.get(key) is not None and given.get(same) is not None:
                raise ParameterError(f"{key} and {same} are both given, must be one of them")
        return cls(**given)

    @classmethod
    def from_json(cls, text: str, **more: Any) -> SpeculativeConfig:
        """From a JSON object and further fields; a field given by both is refused."""
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ParameterError(f"speculative_config is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise refuse("speculative_config", given, "a JSON object")
        if twice := sorted(given.keys() & more.keys()):
            raise ParameterError(f"speculative_config has {twice[0]}, which is also given by itself")
        return cls.parse({**given, **more})


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    block_size: KV slots per block.
    num_blocks: blocks in the pool; None takes what max_num_seqs sequences of max_model_len need, within half of the
        free memory. On the CPU a block takes memory from its first use on.
    max_num_seqs: sequences that run together; others wait.
    max_num_batched_tokens: prompt tokens per prefill step.
    max_model_len: tokens a sequence may have; None is the target's own limit.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in get_type_hints(type(self)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
