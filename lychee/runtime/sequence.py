"""A sequence: one completion of one request, from its prompt to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lychee.models.detokenizer import Detokenizer

from .metrics import RequestStats
from .sampling_params import SamplingParams


class Mode(Enum):
    """How a sequence's proposals are accepted."""

    GREEDY = "greedy"  # coupled without noise
    COUPLED = "coupled"
    REJECTION = "rejection"  # by draft probabilities: rejection or traversal, as the engine's rule says


@dataclass(eq=False)
class Sequence:
    """Tokens, KV blocks and progress of one completion.

    While decoding, `tokens[-1]` is the root: committed, its KV not yet cached, so `cached == len(tokens) - 1`.
    `draft_cached` is the draft model's validity: how many leading tokens have KV in the draft's storage.
    The first `published` blocks may be shared with others and are not written, whatever model's KV they hold: the
    draft's is only added where nobody has it yet. `keys` are those of the prefix cache.
    """

    seq_id: int
    request_id: int
    sample_idx: int
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: Mode
    seed: int
    limit: int  # tokens in all, prompt included, at which it ends
    end_ids: frozenset[int]  # end-of-sequence and stop token ids
    bad_words: tuple[tuple[int, ...], ...]
    detokenizer: Detokenizer
    stats: RequestStats
    speculates: bool = True  # False: its rounds are native
    leader: Sequence | None = None  # the sequence whose prefill this one waits for, to share its blocks
    cache_salt: str = ""  # prefixes are shared with requests of the same salt alone
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    draft_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    keys: list[bytes] = field(default_factory=list)
    text: str = ""
    held: str = ""  # text that may begin a stop string, not yet shown
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def emitted(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def decoding(self) -> bool:
        """The whole prefix but the root is cached, and a first token exists to be the root."""
        return self.num_emitted > 0 and self.cached == len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
