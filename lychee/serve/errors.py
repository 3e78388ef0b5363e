"""What a client is told when something is wrong, in the form of OpenAI's API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lychee.models.chat import ChatError
from lychee.runtime.checks import ContextError, ParameterError

from .job import DeadlineError, EngineFailedError, QueueFullError, QueueTimeoutError, ServiceError, StoppedError

MAX_MESSAGE = 600  # characters: messages quote what was sent
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
SERVICE = {  # status, code, seconds after which it may be tried again
    QueueFullError: (429, "queue_full", 1),
    QueueTimeoutError: (503, "queue_timeout", 1),
    StoppedError: (503, "draining", 5),
    DeadlineError: (504, "deadline_exceeded", None),
    EngineFailedError: (500, "engine_failed", None),
}


@dataclass
class ApiError(Exception):
    """param: the field that is wrong. retry_after_s: when it may be tried again."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 3] + "..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"retry-after", b"%d" % self.retry_after_s)] if self.retry_after_s is not None else []
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 504:
            headers.append((b"x-should-retry", b"false"))  # OpenAI's client would send it again, to no better end
        return headers


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def api_error(error: Exception, prompt_field: str = "prompt") -> ApiError | None:
    """What a client is told of an error that concerns it; None where it is our own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ChatError):
        return bad("messages", str(error))
    if isinstance(error, ParameterError):  # its message begins with the parameter
        name = re.sub(r"^prompt and |\W.*", "", str(error), flags=re.DOTALL)
        code = "context_length_exceeded" if isinstance(error, ContextError) else "invalid_value"
        return bad(prompt_field if name == "prompt" else name, str(error), code)
    if isinstance(error, ServiceError):
        status, code, retry = SERVICE[type(error)]
        return ApiError(status, code, str(error), retry_after_s=retry)
    return None
