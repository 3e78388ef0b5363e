"""Configuration of speculation and of the engine."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal, get_args, get_type_hints

from .checks import ParameterError, check_bool, check_float, check_int, check_names, named_keywords, refuse
from .tree import TreeShape, parse_tree

Verify = Literal["auto", "rejection", "traversal", "coupled"]
MAX_DRAFT_LEN = 32
MAX_NODES = 64
MAX_SLOTS = 2**31 - 1  # their numbers are int32
PLANNED_NODES = 32
NOT_GIVEN: Any = None  # as the default says where the field is used, else None


@named_keywords
@dataclass(frozen=True)
class SpeculativeConfig:
    """How a draft model is used. A field that contradicts another, or would be ignored, is refused.

    max_draft_len: most tokens drafted in a round, 0 to 32 (default 16); 0 decodes natively. Of children by depth it is
        the depth.
    adaptive (alias adaptive_max_draft_len): of a chain, choose the length per request and round from its recent
        acceptance, the default; otherwise it is fixed.
    num_speculative_tokens: a fixed length; the same as max_draft_len=k with adaptive=False.
    acceptance_threshold: a chain's adaptive length shrinks while the acceptance rate of recent rounds is below this
        (default 0.4).
    fallback_sampling: draw the token after a rejection from the residual distribution, which keeps the output
        distributed exactly as the target's. False draws it from the unmodified target distribution: lossy.
    verify: `rejection` and `traversal` keep the distribution; `coupled` draws draft and target with the request's own
        noise, so a seed gives the tokens of native decoding; `auto` is coupled for a request with a seed, traversal for
        others. At temperature 0 all are greedy.
    tree: `auto`, the default, plans chains, trees or none, whichever emits most per millisecond by the measured costs
        of rounds and each request's acceptance, and stops drafting where the rest would not pay. `chain` drafts one
        token after another; it is the default where a length is fixed, or adaptive or acceptance_threshold is given.
        Children by depth, as in "4,2,2", draft that tree in every round.
    node_budget: most nodes drafted in a round of a tree, 1 to 64 (default 64, with `auto` 32).
    """

    max_draft_len: int = NOT_GIVEN
    adaptive: bool = NOT_GIVEN
    num_speculative_tokens: int | None = None
    acceptance_threshold: float = NOT_GIVEN
    fallback_sampling: bool = True
    verify: Verify = "auto"
    tree: str = NOT_GIVEN
    node_budget: int | None = None
    adaptive_max_draft_len: InitVar[bool | None] = None

    def __post_init__(self, adaptive_max_draft_len: bool | None) -> None:
        if adaptive_max_draft_len is not None:
            check_bool("adaptive_max_draft_len", adaptive_max_draft_len)
            if self.adaptive not in (None, adaptive_max_draft_len):
                raise refuse("adaptive", self.adaptive, "left out where its alias adaptive_max_draft_len is given")
            object.__setattr__(self, "adaptive", adaptive_max_draft_len)
        of_chains = self.num_speculative_tokens, self.adaptive, self.acceptance_threshold
        is_chain = self.max_draft_len == 0 or any(given is not None for given in of_chains)
        self._fill(("tree", "chain" if is_chain else "auto"))
        self._check_values()
        self._check_lengths()
        self._check_uses()
        shape = self.shape
        self._fill(
            ("max_draft_len", shape.depth if isinstance(shape, TreeShape) else self.num_speculative_tokens),
            ("max_draft_len", 16),
            ("adaptive", self._fixed_by is None),
            ("acceptance_threshold", 0.4 if self._threshold_unused_as is None else None),
        )

    def _fill(self, *defaults: tuple[str, Any]) -> None:
        """Give fields that are not given these values; of a field named twice, the first that is not None."""
        for name, default in defaults:
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def _check_values(self) -> None:
        """Each field by itself."""
        for name in ("max_draft_len", "num_speculative_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_DRAFT_LEN)
        if self.node_budget is not None:
            check_int("node_budget", self.node_budget, 1, MAX_NODES)
        if self.acceptance_threshold is not None:
            check_float("acceptance_threshold", self.acceptance_threshold, 0.0, 1.0)
        if self.adaptive is not None:
            check_bool("adaptive", self.adaptive)
        check_bool("fallback_sampling", self.fallback_sampling)
        if self.verify not in get_args(Verify):
            raise refuse("verify", self.verify, " or ".join(get_args(Verify)))

    def _check_lengths(self) -> None:
        """Refuse lengths that contradict each other or the tree."""
        shape, length = self.shape, self.num_speculative_tokens
        if length is not None and self.max_draft_len not in (None, length):
            raise refuse("max_draft_len", self.max_draft_len, "left out where num_speculative_tokens is given")
        if length is not None and shape != "chain":
            raise refuse("num_speculative_tokens", length, f"left out where tree is {self.tree!r}")
        if isinstance(shape, TreeShape) and self.max_draft_len not in (None, shape.depth):
            raise refuse("max_draft_len", self.max_draft_len, f"left out where tree is {self.tree!r}")
        if self.node_budget is not None and shape == "chain":
            raise refuse("node_budget", self.node_budget, "left out without a tree: max_draft_len limits a chain")

    def _check_uses(self) -> None:
        """Refuse what another field contradicts or leaves without a use."""
        if self.adaptive and self._fixed_by is not None:
            raise refuse("adaptive", True, f"left out where {self._fixed_by}, which is the same in every round")
        if self.adaptive is False and self.tree == "auto":
            raise refuse("adaptive", False, "left out where tree is 'auto', which adapts what is drafted")
        if self.acceptance_threshold is not None and (why := self._threshold_unused_as):
            raise refuse("acceptance_threshold", self.acceptance_threshold, f"left out where {why}")
        never = 0 in (self.max_draft_len, self.num_speculative_tokens)
        if never and self.tree == "auto":
            raise refuse("tree", self.tree, "left out where max_draft_len is 0: nothing is drafted")
        if not self.fallback_sampling and (self.verify == "coupled" or never):
            why = "nothing is drafted" if never else "verify is 'coupled'"
            raise refuse("fallback_sampling", False, f"left out where {why}: nothing is drawn after a rejection")

    @property
    def _fixed_by(self) -> str | None:
        """What makes the drafts of all rounds the same, if another field than `adaptive` does."""
        if self.num_speculative_tokens is not None:
            return f"num_speculative_tokens is {self.num_speculative_tokens}"
        if self.max_draft_len == 0:
            return "max_draft_len is 0"
        return f"tree is {self.tree!r}" if isinstance(self.shape, TreeShape) else None

    @property
    def _threshold_unused_as(self) -> str | None:
        if self.tree == "auto":
            return "tree is 'auto', which goes by what pays"
        if self.adaptive is False and self._fixed_by is None:
            return "adaptive is False"
        return self._fixed_by

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
        check_names("speculative_config", given, inspect.signature(cls).parameters)
        for key, same in (("num_speculative_tokens", "max_draft_len"), ("adaptive_max_draft_len", "adaptive")):
            if given.get(key) is not None and given.get(same) is not None:
                raise ParameterError(f"{key} and {same} are both given, must be one of them")
        return cls(**given)

    @classmethod
    def from_json(cls, text: str, **more: Any) -> SpeculativeConfig:
        """From a JSON object and further fields; a field given by both is refused."""
        try:
            given = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ParameterError(f"speculative_config is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise refuse("speculative_config", given, "a JSON object")
        if twice := sorted(given.keys() & more.keys()):
            raise ParameterError(f"speculative_config has {twice[0]}, which is also given by itself")
        return cls.parse({**given, **more})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which a key that comes twice is refused."""
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(key for key in given if sum(key == other for other, _ in pairs) > 1)
        raise ParameterError(f"speculative_config has {twice} twice")
    return given


@named_keywords
@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    block_size: KV slots per block.
    num_blocks: blocks in the pool, with fewer than 2^31 slots; None takes what max_num_seqs sequences of max_model_len
        need, within half of the free memory. On the CPU a block takes memory from its first use on.
    max_num_seqs: sequences that run together; others wait.
    max_num_batched_tokens: prompt tokens per prefill step.
    prefill_budget: the same while other sequences decode, who wait for the step; None is max_num_batched_tokens.
        Less makes streams smooth and a batch that begins at once slower.
    max_model_len: tokens a sequence may have; None is the target's own limit.
    prefix_cache: keep the KV of full blocks after their sequence has ended, as long as there is room, for requests that
        begin with the same tokens.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_budget: int | None = None
    max_model_len: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        check_bool("prefix_cache", self.prefix_cache)
        for name in get_type_hints(type(self)).keys() - {"prefix_cache"}:
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("block_size", self.block_size, 1, MAX_SLOTS)
        if self.prefill_budget is not None and self.prefill_budget > self.max_num_batched_tokens:
            legal = f"at most max_num_batched_tokens, {self.max_num_batched_tokens}"
            raise refuse("prefill_budget", self.prefill_budget, legal)
        if self.num_blocks is not None and self.num_blocks > MAX_SLOTS // self.block_size:
            most = MAX_SLOTS // self.block_size
            raise refuse("num_blocks", self.num_blocks, f"at most {most} of block_size {self.block_size}")
