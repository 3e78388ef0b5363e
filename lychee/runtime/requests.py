"""Requests: prompts and parameters, checked against the model and turned into sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lychee.models.detokenizer import Detokenizer
from lychee.models.tokenizer import Tokenizer
from lychee.nouns import counted

from .checks import ContextError, ParameterError, refuse
from .config import Verify
from .metrics import RequestStats
from .sampling_params import SamplingParams
from .sequence import Mode, Sequence

Prompt = str | Seq[int]


@dataclass(frozen=True)
class RequestMaker:
    """What a request is checked against. vocab: token ids that may appear; eos_ids: those that end a text."""

    tokenizer: Tokenizer
    vocab: int
    max_model_len: int
    eos_ids: frozenset[int]
    verify: Verify

    def mode(self, params: SamplingParams) -> Mode:
        """How proposals for such a request are accepted."""
        if params.greedy:
            return Mode.GREEDY
        coupled = self.verify == "coupled" or (self.verify == "auto" and params.seed is not None)
        return Mode.COUPLED if coupled else Mode.REJECTION

    def sequences(
        self, prompt: Prompt, params: SamplingParams, first_id: int, cache_salt: str | None = None
    ) -> list[Sequence]:
        """The n sequences of one prompt, ids from `first_id` on; all but the first share its prompt blocks.

        cache_salt: prefixes are shared with requests of the same salt alone. Raises ParameterError.
        """
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise refuse("cache_salt", cache_salt, "text of at least one character, or None")
        ids = tuple(self.encode(prompt))
        if len(ids) >= self.max_model_len:
            raise ContextError(
                f"prompt has {counted(len(ids), 'token')}, must leave room below max_model_len={self.max_model_len}"
            )
        for name, given in (("logit_bias id", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in given or ():
                if token >= self.vocab:
                    raise refuse(name, token, f"a token id below {self.vocab}")
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little", signed=True)
        end_ids = frozenset(params.stop_token_ids or ()).union(() if params.ignore_eos else self.eos_ids)
        bad_words = self._bad_words(params)
        self._check_bans(params, end_ids, bad_words)
        continues = not self.tokenizer.special_ids.issuperset(ids)
        seqs: list[Sequence] = []
        for sample_idx in range(params.n):
            seqs.append(
                Sequence(
                    seq_id=first_id + sample_idx,
                    request_id=first_id,
                    sample_idx=sample_idx,
                    prompt=ids,
                    params=params,
                    mode=self.mode(params),
                    seed=seed,
                    limit=min(len(ids) + params.max_tokens, self.max_model_len),
                    end_ids=end_ids,
                    bad_words=bad_words,
                    detokenizer=Detokenizer(self.tokenizer, continues, params.skip_special_tokens),
                    stats=RequestStats(prompt_tokens=len(ids)),
                    leader=seqs[0] if seqs else None,
                    cache_salt=cache_salt or "",
                )
            )
        return seqs

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ParameterError."""
        if isinstance(prompt, str):
            if not prompt:
                raise refuse("prompt", prompt, "text of at least one character, or token ids")
            try:
                ids: list[Any] = self.tokenizer.encode(prompt)
            except ValueError as error:
                raise ParameterError(f"prompt: {error}") from error
        elif isinstance(prompt, Iterable):
            ids = list(prompt)
        else:
            raise refuse("prompt", prompt, "text, or token ids")
        if not ids or any(
            isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= int(i) < self.vocab for i in ids
        ):
            raise refuse("prompt", ids[:8], f"text, or token ids in 0..{self.vocab - 1}")
        return [int(i) for i in ids]

    def _check_bans(
        self, params: SamplingParams, end_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        """Refuse bans that could leave no token to emit."""
        banned = {token for token, bias in (params.logit_bias or {}).items() if bias == float("-inf")}
        banned.update(word[-1] for word in bad_words)
        if params.min_tokens:
            banned |= end_ids
        if banned.issuperset(range(self.vocab)):
            raise ParameterError(
                f"logit_bias, bad_words and min_tokens ban all {self.vocab} tokens, must leave one to emit"
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word inside a text, with and without a space before it."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip(" ")):
                if ids := tuple(self.tokenizer.encoder.marked(text, False)):
                    found[ids] = None
        return tuple(found)
