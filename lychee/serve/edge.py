"""The outermost layers: every exchange has an id, a line in the log, an answer in the API's form, and needs a key."""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServiceConfig
from .errors import ApiError, api_error
from .exchange import ClientGoneError, header, send_json

OPEN_PATHS = ("/health",)
ADMIN = "/admin"


@dataclass
class Record:
    """What is known of an exchange; a line of the log when it ends."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = "anonymous"
    status: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def log_line(entry: dict[str, Any]) -> None:
    print(json.dumps(entry), file=sys.stderr, flush=True)


class Edge:
    """Answers for what goes wrong within. write: takes the log's entries."""

    def __init__(self, app: ASGIApp, write: Callable[[dict[str, Any]], None]) -> None:
        self.app, self.write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope["record"] = Record()
        began = time.perf_counter()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, receive, tell, record)
        except ClientGoneError:
            record.notes["client"] = "gone"
        finally:
            entry = {
                "time": round(time.time(), 3),
                "request_id": record.request_id,
                "key": record.key,
                "method": scope["method"],
                "path": scope["path"],
                "status": record.status,
                "seconds": round(time.perf_counter() - began, 4),
            }
            self.write(entry | record.notes)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        try:
            await self.app(scope, receive, send)
            return
        except ClientGoneError:
            raise
        except HTTPException as error:  # the router's
            code = "method_not_allowed" if error.status_code == 405 else "not_found"
            told = ApiError(error.status_code, code, f"{scope['method']} {scope['path']}: {error.detail}")
        except Exception as error:
            told = api_error(error) or ApiError(500, "internal_error", "the server failed to answer; its log says more")
            if told.code == "internal_error":
                record.notes["traceback"] = traceback.format_exc()
        record.notes |= {"error": told.code, "param": told.param}
        if record.status is None:
            await send_json(send, told.status, told.body, told.headers)


class Auth:
    """With keys, everything needs one but OPEN_PATHS; /admin needs the admin's own, and is not there without."""

    def __init__(self, app: ASGIApp, config: ServiceConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]  # as the router sees it
        if path in OPEN_PATHS:
            return
        admin = path == ADMIN or path.startswith(ADMIN + "/")
        if admin and self.config.admin_key is None:
            raise ApiError(404, "not_found", f"{path}: not found")
        keys = (self.config.admin_key or "",) if admin else self.config.api_keys
        if not keys:
            return
        given = header(scope, b"authorization") or b""
        kind, _, secret = given.partition(b" ")
        known = [key for key in keys if hmac.compare_digest(key.encode(), secret)]  # all are compared
        if kind.lower() != b"bearer" or not known:
            raise ApiError(401, "invalid_api_key", "give a valid API key as `Authorization: Bearer KEY`")
        scope["record"].key = key_name(known[0])


def key_name(key: str) -> str:
    """What stands for a key in logs and counts."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
