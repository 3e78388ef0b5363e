"""A service on a real socket, in a thread of the test's own process, and plain HTTP to it."""

import asyncio
import functools
import http.client
import json
import threading
import time
from contextlib import contextmanager, suppress

from lychee import LLM, SamplingParams, demo
from lychee.models.chat import ChatTemplate
from lychee.serve.async_engine import QueueLimits
from lychee.serve.config import ServiceConfig
from lychee.serve.server import Server, bound_socket
from lychee.serve.service import Service

MODEL = "lychee-demo"
CODE = "def read_line(fp):\n"
PLAIN_CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"  # the packaged pair has no template of its own


@functools.cache
def packaged(name="own", tree="auto"):
    """The packaged pair, which one service at a time may use. The fixture's service has another than a test's own."""
    return LLM(demo.TARGET, demo.DRAFT, {"tree": tree}, num_blocks=512, device="cpu")


@functools.cache
def native():
    """The packaged target alone: what every answer has to be."""
    return LLM(demo.TARGET, num_blocks=512, device="cpu")


@functools.cache
def reference(prompt, **params):
    return native().generate([prompt], SamplingParams(**params))[0].outputs


class Running:
    def __init__(self, service, address, log):
        self.service, self.address, self.log = service, address, log
        self.url = f"http://{address[0]}:{address[1]}/v1"

    def ask(self, method, path, body=None, headers=None):
        """Status, headers and body of an answer; JSON is read. `body` is sent as JSON unless it is bytes."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            given = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, given | (headers or {}))
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.getheader("content-type", "").startswith("application/json")
            return answer.status, dict(answer.getheaders()), json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def complete(self, **given):
        """Status and body of a completion."""
        status, _, body = self.ask("POST", "/v1/completions", {"model": MODEL, "prompt": CODE} | given)
        return status, body

    def logged(self, request_id):
        """The log's entry of a request, which is written when its answer has been."""
        until = time.perf_counter() + 20
        while not (found := [entry for entry in self.log if entry["request_id"] == request_id]):
            assert time.perf_counter() < until, "nothing is logged"
            time.sleep(0.005)
        return found[0]

    def opened(self, jobs):
        """Wait until so many requests are open."""
        until = time.perf_counter() + 30
        while len(self.service.engine.jobs) < jobs:
            assert time.perf_counter() < until, "the requests do not begin"
            time.sleep(0.001)

    def settled(self, timeout_s=20):
        """Wait until nothing is open; every block is free, then, and nothing is kept of any request."""
        until, service = time.perf_counter() + timeout_s, self.service
        engine = service.engine
        while engine.jobs or engine.open_sequences or engine._stepper._open or service.rates._open:
            assert time.perf_counter() < until, "something is still open"
            time.sleep(0.01)
        scheduler = service.engine.engine.scheduler
        while not scheduler.idle or scheduler.pool.num_free < scheduler.pool.num_blocks:
            assert time.perf_counter() < until, "blocks are kept"
            time.sleep(0.01)
        assert not service.metrics._last


@contextmanager
def serving(llm=None, limits=None, **config):
    """A running service; it is drained at the end."""
    llm, log = llm or packaged(), []
    chat = ChatTemplate(PLAIN_CHAT, llm.tokenizer)
    service = Service(llm, ServiceConfig(**{"model_name": MODEL} | config), limits or QueueLimits(), chat)
    service.engine._stepper._make = llm.engine  # without warm-up
    listener, started = bound_socket("127.0.0.1", 0), threading.Event()
    server = Server(service, 1024, started.set, log.append)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    assert started.wait(60)
    running = Running(service, listener.getsockname(), log)
    running.server = server
    try:
        yield running
    finally:
        with suppress(RuntimeError):  # its loop is closed: the test has ended it
            server.handle_exit(15, None)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
