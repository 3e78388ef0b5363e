"""Completions and chats: from a body to an answer, whole or streamed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from starlette.types import Receive, Scope, Send

from lychee.nouns import counted
from lychee.runtime.requests import Prompt
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.sequence import Sequence
from lychee.runtime.streamer import Chunk

from .edge import Record
from .errors import ApiError, api_error, bad
from .exchange import ClientGoneError, Events, read_json, send_json, while_there
from .formats import ChatFormat, CompletionFormat, Envelope, usage
from .job import Job, merged
from .schemas import ChatBody, CompletionBody, Generation, parse
from .service import Service


class Generate:
    """An endpoint. `body` says which."""

    def __init__(self, service: Service, body: type[CompletionBody] | type[ChatBody]) -> None:
        self.service, self.body = service, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config, record = self.service.config, scope["record"]
        with self.service.rates.request(record.key):
            body = parse(self.body, await read_json(scope, receive, config.max_body_bytes, config.body_s))
            try:
                await while_there(receive, self._answer(scope, send, body, record))
            except ClientGoneError:
                self.service.drop_connection(scope)
                raise
            except Exception as error:  # said here, where it is known what the prompt's field is called
                field = "messages" if isinstance(body, ChatBody) else "prompt"
                if told := api_error(error, field):
                    raise told from error
                raise

    async def _answer(self, scope: Scope, send: Send, body: Generation, record: Record) -> None:
        service, config = self.service, self.service.config
        service.check_model(body.model)
        prompts, params = await self._request(body)
        if len(prompts) * params.n > config.max_completions:
            asked = f"n={params.n} of {counted(len(prompts), 'prompt')} makes {len(prompts) * params.n} completions"
            raise bad(
                "n" if params.n > config.max_completions else "prompt", f"{asked}, may be {config.max_completions}"
            )
        speculates, salt = service.speculates(body, record), f"{record.key} {body.cache_salt or ''}"
        seqs = await service.engine.prepare(prompts, params, speculates=speculates, cache_salt=salt)
        self._check_room(seqs, body)
        service.rates.tokens(record.key, sum(s.limit - s.num_prompt * (s.sample_idx > 0) for s in seqs))
        job = service.engine.submit(seqs)
        record.notes["channel"] = job.channel
        if config.log_prompts:
            record.notes["prompts"] = [service.llm.tokenizer.decode(s.prompt) for s in seqs if s.sample_idx == 0]
        failure: Exception | None = ClientGoneError()  # where it is cancelled
        try:
            form = (ChatFormat if isinstance(body, ChatBody) else CompletionFormat)(service.llm.tokenizer)
            envelope = Envelope(form, record.request_id, config.model_name)
            await (self._stream if body.stream else self._whole)(send, body, job, envelope)
            failure = None
        except Exception as error:
            failure = error
            raise
        finally:
            service.engine.close(job)
            service.closed(job, failure)
            record.notes |= {"stream": bool(body.stream), **_told(job)}

    async def _request(self, body: Generation) -> tuple[list[Prompt], SamplingParams]:
        """Prompts and parameters. A chat may use all the room that its context has."""
        config, most = self.service.config, body.max_tokens
        if body.stream_options is not None and not body.stream:
            raise bad("stream_options", "stream_options is given without stream")
        if isinstance(body, CompletionBody):
            prompts: Any = body.prompt
            if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
                prompts = [prompts]
            if not prompts:
                raise bad("prompt", "prompt is [], must be text, token ids, or a list of them")
            return prompts, body.sampling(config, max_tokens=most, logprobs=body.logprobs)
        assert isinstance(body, ChatBody)
        if most is not None and body.max_completion_tokens not in (None, most):
            raise bad("max_tokens", "max_tokens and max_completion_tokens are both given, and differ")
        most = body.max_completion_tokens if most is None else most
        if body.top_logprobs is not None and not body.logprobs:
            raise bad("top_logprobs", "top_logprobs is given without logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        ids = await self.service.encode_chat(body.messages)
        if most is None:
            most = max(1, self.service.longest - len(ids))
        return [ids], body.sampling(config, max_tokens=most, logprobs=logprobs)

    def _check_room(self, seqs: list[Sequence], body: Generation) -> None:
        """The engine would end such a completion early, and not say so."""
        longest = max(seqs, key=lambda seq: seq.num_prompt)
        wanted = longest.num_prompt + longest.params.max_tokens
        if wanted > self.service.llm.max_model_len:
            name = "max_tokens" if body.max_tokens is not None or isinstance(body, CompletionBody) else None
            raise bad(
                name or "max_completion_tokens",
                f"a prompt of {counted(longest.num_prompt, 'token')} and max_tokens={longest.params.max_tokens} make "
                f"{wanted} tokens, may be {self.service.llm.max_model_len}",
                "context_length_exceeded",
            )

    async def _whole(self, send: Send, body: Generation, job: Job, envelope: Envelope) -> None:
        parts: defaultdict[int, list[Chunk]] = defaultdict(list)
        while chunks := await job.mailbox.take():
            for index, chunk in chunks.items():
                parts[index].append(chunk)
        choices = [envelope.form.whole(index, merged(parts[index])) for index in range(len(job.seqs))]
        await send_json(send, 200, envelope.whole(choices, _usage(job)))

    async def _stream(self, send: Send, body: Generation, job: Job, envelope: Envelope) -> None:
        """Nothing is sent before the first token, so that an error until then has its own status."""
        events, form = Events(send, self.service.config.stall_s), envelope.form
        try:
            while chunks := await job.mailbox.take():
                if not events.started:
                    await events.start()
                choices = [choice for index, chunk in chunks.items() for choice in form.part(index, chunk)]
                await events.send(*(envelope.event([choice], None, body.include_usage) for choice in choices))
            if body.include_usage:
                await events.send(envelope.event([], _usage(job), True))
            await events.end()
        except ClientGoneError:
            raise
        except Exception as error:
            if events.started:
                await events.fail(api_error(error) or ApiError(500, "internal_error", "the server failed to answer"))
            raise


def _usage(job: Job) -> dict[str, int]:
    prompts = sum(seq.num_prompt for seq in job.seqs if seq.sample_idx == 0)
    return usage(prompts, sum(seq.num_emitted for seq in job.seqs))


def _told(job: Job) -> dict[str, Any]:
    """For the log."""
    first = [seq.stats.ttft_s for seq in job.seqs if seq.stats.ttft_s is not None]
    return {
        "prompt_tokens": sum(seq.num_prompt for seq in job.seqs if seq.sample_idx == 0),
        "completion_tokens": sum(seq.num_emitted for seq in job.seqs),
        "finish_reasons": [seq.finish_reason or "abort" for seq in job.seqs],
        "ttft_s": round(min(first), 4) if first else None,
    }
