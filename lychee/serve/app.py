"""The ASGI application: routes, and the layers around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lychee.runtime.checks import check_float

from .edge import Auth, Edge, log_line
from .errors import ApiError, bad
from .exchange import read_json, send_bytes, send_json
from .generate import Generate
from .schemas import ChatBody, CompletionBody, SpeculationBody, TokenizeBody, parse
from .service import Service

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def application(service: Service, write: Callable[[dict[str, Any]], None] = log_line) -> ASGIApp:
    """Starts and stops the service's engine with the server's lifespan. write: takes the log's entries."""

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        await service.engine.start()
        yield
        await service.engine.stop()

    service.guard.tell = write
    endpoints = Endpoints(service)
    router = Router(
        [
            Route("/v1/completions", Generate(service, CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", Generate(service, ChatBody), methods=["POST"]),
            Route("/v1/models", Endpoint(endpoints.models), methods=["GET"]),
            Route("/v1/models/{name:path}", Endpoint(endpoints.model), methods=["GET"]),
            Route("/tokenize", Endpoint(endpoints.tokenize), methods=["POST"]),
            Route("/health", Endpoint(endpoints.health), methods=["GET"]),
            Route("/ready", Endpoint(endpoints.ready), methods=["GET"]),
            Route("/admin/speculation", Endpoint(endpoints.speculation), methods=["GET", "POST"]),
            Route("/metrics", Endpoint(endpoints.metrics), methods=["GET"]),
        ],
        redirect_slashes=False,
        lifespan=lifespan,
    )

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # what is not found is raised, then, and answered as other errors are
        await router(scope, receive, send)

    app: ASGIApp = Auth(routed, service.config)
    if service.config.cors_origins:
        headers, origins = ["authorization", "content-type"], service.config.cors_origins
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)
    return Edge(app, write)


class Endpoint:
    """An endpoint that is no function, which the router would call otherwise."""

    def __init__(self, endpoint: ASGIApp) -> None:
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.endpoint(scope, receive, send)


class Endpoints:
    """Those that generate nothing."""

    def __init__(self, service: Service) -> None:
        self.service, self.created = service, int(time.time())

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The process is alive, and so is what it is for: where this fails, start it anew."""
        if not self.service.engine.alive:
            raise ApiError(503, "dead", "the engine has ended, or failed and could not be made anew")
        await send_json(send, 200, {"status": "alive"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self.service.engine
        if engine.draining:
            raise ApiError(503, "draining", "the service is shutting down and takes no new requests", retry_after_s=5)
        if not engine.ready:
            raise ApiError(503, "not_ready", "the engine is being restarted, or could not be", retry_after_s=1)
        await send_json(send, 200, {"status": "ready"})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self.service.metrics.text(), METRICS_TYPE)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"object": "list", "data": [self._model()]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.check_model(scope["path_params"]["name"])
        await send_json(send, 200, self._model())

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Token ids of a prompt, as a completion of it would have them."""
        service, config = self.service, self.service.config
        with service.rates.request(scope["record"].key):
            body = parse(TokenizeBody, await read_json(scope, receive, config.max_body_bytes, config.body_s))
            if body.model is not None:
                service.check_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise bad("prompt", "give prompt, or messages, and not both")
            if body.messages is not None:
                ids = await service.encode_chat(body.messages)
            else:
                assert body.prompt is not None
                ids = await service.engine.encode(body.prompt)
        limit = service.llm.max_model_len
        await send_json(send, 200, {"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def speculation(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tells the share of the accelerated channel and how it compares, and sets it."""
        guard, config = self.service.guard, self.service.config
        if scope["method"] == "POST":
            body = parse(SpeculationBody, await read_json(scope, receive, config.max_body_bytes, config.body_s))
            if self.service.llm.draft is None:
                raise bad("share", "this server has no draft model")
            guard.set_share(check_float("share", body.share, 0.0, 1.0))
            scope["record"].notes["share"] = body.share
        await send_json(send, 200, {"share": guard.channel.share, "guard": guard.verdict.report()})

    def _model(self) -> dict[str, Any]:
        name, limit = self.service.config.model_name, self.service.llm.max_model_len
        return {"id": name, "object": "model", "created": self.created, "owned_by": "lychee", "max_model_len": limit}
