"""The service: an engine, its chat template, limits and metrics, and what endpoints ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

from starlette.types import Scope

from lychee.models.chat import ChatError, ChatTemplate
from lychee.runtime.llm import LLM
from lychee.runtime.streamer import Chunk

from .async_engine import AsyncEngine, QueueLimits
from .channel import Channel
from .config import ServiceConfig
from .edge import Record
from .errors import ApiError, bad
from .exchange import ClientGoneError
from .guard import Guard
from .job import Job
from .metrics import ServiceMetrics
from .rates import Rates
from .schemas import Generation, Message


class Service:
    """chat: None where the model has no template."""

    def __init__(self, llm: LLM, config: ServiceConfig, limits: QueueLimits, chat: ChatTemplate | None) -> None:
        self.llm, self.config, self.chat = llm, config, chat
        self.rates, self.metrics = Rates(config.rates), ServiceMetrics(config.model_name)
        self.engine = AsyncEngine(llm, limits, observe=self._observe)
        self.channel = Channel(config.speculation_share if llm.draft else 0.0)
        self.guard = Guard(self.channel, self.engine.trial, config.margins)
        self.metrics.engine, self.metrics.guard = self.engine, self.guard
        self.transports: dict[tuple[str, int], asyncio.Transport] = {}  # of open connections, by their other end

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        pool = self.engine.engine.scheduler.pool
        return min(self.llm.max_model_len, pool.num_blocks * pool.block_size)

    def _observe(self, job: Job, index: int, chunk: Chunk) -> None:
        self.metrics.observe(job, index, chunk)
        self.guard.served(job.speculates)

    def closed(self, job: Job, error: Exception | None) -> None:
        """A job's reader is done with it; `error` is why it has not all its completions."""
        gone = isinstance(error, ClientGoneError)
        self.metrics.closed(job, None if error is None else "abort" if gone else "error")
        self.guard.ended(job.speculates, None if gone else error)

    def check_model(self, name: str) -> None:
        if name != self.config.model_name:
            message = f"model is {name!r}, must be {self.config.model_name!r}"
            raise ApiError(404, "model_not_found", message, "model")

    def speculates(self, body: Generation, record: Record) -> bool:
        """Whether the request is to be drafted for: as it asks, else as its user, or itself, falls."""
        if body.speculative and self.llm.draft is None:
            raise bad("speculative", "speculative is true, but this server has no draft model")
        if self.llm.draft is None:
            return False
        if body.speculative is not None:
            return body.speculative
        return self.channel.takes(record.request_id if body.user is None else f"{record.key} {body.user}")

    async def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """Raises ChatError."""
        for i, message in enumerate(messages):
            if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
                raise ChatError(f"messages[{i}].content has a part that is not text, which this model cannot read")
        if self.chat is None:
            raise ChatError(
                f"messages: model {self.config.model_name!r} has no chat template; send a prompt to /v1/completions, "
                "or start the server with --chat-template FILE"
            )
        chat, given = self.chat, [{"role": m.role, "content": m.text} for m in messages]
        return await asyncio.to_thread(lambda: self.llm.tokenizer.encode_chat(chat.render(given)))

    def drop_connection(self, scope: Scope) -> None:
        """Give up what waits to be sent to a client that does not take it."""
        if scope.get("client") and (transport := self.transports.get(tuple(scope["client"]))):
            transport.abort()
