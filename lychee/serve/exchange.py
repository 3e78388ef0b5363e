"""One HTTP exchange: a body of bounded size and time in, JSON or events out, and an eye on the client being there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from lychee.nouns import counted

from .errors import ApiError

JSON_TYPE = b"application/json"


class ClientGoneError(Exception):
    """The client has closed the connection, or reads nothing any more."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The only header of this name; None where there is none, or more than one."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else None


async def read_json(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The body, which must be declared to be JSON: a web page may not send that to another site without its consent."""
    if (header(scope, b"content-type") or b"").split(b";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, "unsupported_media_type", "content-type must be application/json")
    too_large = ApiError(413, "body_too_large", f"the body may have at most {counted(max_bytes, 'byte')}")
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    try:
        return await asyncio.wait_for(read(), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, "body_timeout", f"the body did not come within {timeout_s:g} s") from None


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; cancel it when the client goes away. The body must have been read."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        for other in (task, gone):
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await other


async def send_json(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    data = json.dumps(body).encode()
    await send_bytes(send, status, data, JSON_TYPE, headers)


async def send_bytes(
    send: Send, status: int, data: bytes, content_type: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    own = [(b"content-type", content_type), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": own + (headers or [])})
    await send({"type": "http.response.body", "body": data})


class Events:
    """Server-sent events. A client that takes nothing for `stall_s` seconds counts as gone."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send, self._stall_s = send, stall_s
        self.started = False

    async def start(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True

    async def send(self, *events: Any) -> None:
        if events:
            await self._write("".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events), more=True)

    async def end(self) -> None:
        await self._write("data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        await self._write(f"data: {json.dumps(error.body)}\n\n", more=False)

    async def _write(self, text: str, more: bool) -> None:
        message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
        try:
            await asyncio.wait_for(self._send(message), self._stall_s)
        except asyncio.TimeoutError:
            raise ClientGoneError from None
