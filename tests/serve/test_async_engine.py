"""Many callers share one engine: outputs are native's, who goes away frees all, failures reach whom they concern."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.checks import ParameterError
from lychee.serve.async_engine import AsyncEngine, QueueLimits
from lychee.serve.job import (
    DeadlineError,
    EngineFailedError,
    QueueFullError,
    QueueTimeoutError,
    StoppedError,
)
from tests.runtime.pairs import PROMPTS, greedy, make_llm, seeded, shared_llm, shown, slow_llm


@asynccontextmanager
async def served(llm=None, log=None, **limits):
    engine = AsyncEngine(llm or make_llm("near"), QueueLimits(**limits), log=(log if log is not None else []).append)
    engine._stepper._make = engine.llm.engine  # no warm-up: the tests' models are tiny
    await engine.start()
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.stop(), 30)
    assert not engine.alive


async def read(engine, prompt, params, **given):
    """Text, ids and finish reason of each completion of a prompt."""
    found = {}
    async for chunk in engine.stream(prompt, params, **given):
        text, ids, _, _ = found.get(chunk.sample_idx, ("", (), None, None))
        found[chunk.sample_idx] = (text + chunk.text, ids + chunk.token_ids, chunk.finish_reason, chunk.stop_reason)
    return [found[i] for i in sorted(found)]


def native(prompt, params):
    return [shown(o) for o in shared_llm().generate([prompt], params)[0].outputs]


async def emptied(engine, timeout_s=10):
    """Wait until the engine holds nothing."""
    until = time.perf_counter() + timeout_s
    scheduler = engine.engine.scheduler
    while not scheduler.idle or scheduler.pool.num_free < scheduler.pool.num_blocks or engine._stepper._open:
        assert time.perf_counter() < until, "something is kept"
        await asyncio.sleep(0.002)
    assert engine.open_sequences == 0
    assert not engine.jobs
    assert engine.engine.controller._history == {} if hasattr(engine.engine.controller, "_history") else True


def run(body):
    return asyncio.run(asyncio.wait_for(body, 120))


@pytest.mark.parametrize("speculates", [True, False])
def test_streams_that_share_the_engine_get_the_tokens_of_native_decoding(speculates):
    wanted = [(p, params) for p in PROMPTS for params in (greedy(), seeded(), seeded(n=3, max_tokens=9))]

    async def body():
        async with served() as engine:
            got = await asyncio.gather(*(read(engine, p, params, speculates=speculates) for p, params in wanted))
            assert got == [native(p, params) for p, params in wanted]
            await emptied(engine)
            drafted = engine.engine.metrics.drafted
            assert drafted > 0 if speculates else drafted == 0

    run(body())


def test_prompts_of_one_call_are_one_job_with_a_number_for_each_completion():
    params = seeded(n=2, max_tokens=6)

    async def body():
        async with served() as engine:
            job, texts = engine.submit(await engine.prepare(PROMPTS, params)), [""] * 8
            while chunks := await job.mailbox.take():
                for index, chunk in chunks.items():
                    texts[index] += chunk.text
            assert texts == [completion[0] for prompt in PROMPTS for completion in native(prompt, params)]
            engine.close(job)
            await emptied(engine)

    run(body())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_reader_that_goes_away_frees_all_that_its_request_has(after):
    async def body():
        async with served() as engine:
            other = asyncio.create_task(read(engine, PROMPTS[1], greedy(max_tokens=60)))
            async with aclosing(engine.stream(PROMPTS[0], seeded(max_tokens=400, n=2))) as stream:
                for _ in range(after):
                    await anext(stream)
            task = asyncio.create_task(read(engine, PROMPTS[2], greedy(max_tokens=400)))
            await asyncio.sleep(0.01 * after)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await other == native(PROMPTS[1], greedy(max_tokens=60))
            await emptied(engine)

    run(body())


def test_a_slow_reader_stalls_nobody_and_finds_its_whole_completion_in_one_chunk():
    params = seeded(max_tokens=100, logprobs=2)

    async def body():
        async with served() as engine:
            job = engine.submit(await engine.prepare([PROMPTS[0]], params))
            await asyncio.gather(*(read(engine, p, greedy(max_tokens=120)) for p in PROMPTS))
            while job.unfinished:
                await asyncio.sleep(0.005)
            assert engine.open_sequences == 0  # nor does it keep others from being admitted
            (chunk,) = (await job.mailbox.take()).values()
            reference = shared_llm().generate([PROMPTS[0]], params)[0].outputs[0]
            assert (chunk.text, chunk.token_ids, chunk.finish_reason) == shown(reference)[:3]
            assert [p.token_id for p in chunk.logprobs] == list(reference.token_ids)
            assert await job.mailbox.take() == {}
            engine.close(job)
            await emptied(engine)

    run(body())


def fail_next_step(engine):
    def step():
        raise RuntimeError("the weather is bad")

    engine.engine.step = step


def test_requests_of_an_engine_that_fails_get_a_reason_and_the_next_ones_an_answer():
    log = []

    async def body():
        async with served(log=log) as engine:
            first = engine.engine
            tasks = [asyncio.create_task(read(engine, p, greedy(max_tokens=400))) for p in PROMPTS]
            while len(engine.jobs) < len(PROMPTS):
                await asyncio.sleep(0.001)
            fail_next_step(engine)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(r) for r in results] == [EngineFailedError] * len(PROMPTS)
            assert "RuntimeError" in str(results[0])
            while not engine.ready:
                await asyncio.sleep(0.001)
            assert engine.engine is not first
            assert engine.restarts == 1
            assert await read(engine, PROMPTS[0], seeded()) == native(PROMPTS[0], seeded())
            await emptied(engine)

    run(body())
    assert "the weather is bad" in log[0]


def test_what_came_before_a_failure_is_read_before_the_failure():
    async def body():
        async with served() as engine:
            stream, text = engine.stream(PROMPTS[0], greedy(max_tokens=400)), ""
            text += (await anext(stream)).text
            await asyncio.sleep(0.02)
            fail_next_step(engine)
            try:
                async for chunk in stream:
                    text += chunk.text
                pytest.fail("it ended as if nothing had happened")
            except EngineFailedError:
                pass
            assert native(PROMPTS[0], greedy(max_tokens=400))[0][0].startswith(text)

    run(body())


def test_an_engine_that_cannot_be_made_anew_answers_every_request_with_that():
    log = []

    async def body():
        async with served(log=log) as engine:
            engine._stepper._renew = fail_to_renew
            task = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=400)))
            while not engine.jobs:
                await asyncio.sleep(0.001)
            fail_next_step(engine)
            with pytest.raises(EngineFailedError):
                await task
            for _ in range(2):
                with pytest.raises(EngineFailedError):
                    await read(engine, PROMPTS[0], greedy())
            while engine.alive:
                await asyncio.sleep(0.001)
            assert not engine.ready
            assert engine.open_sequences == 0

    run(body())
    assert "could not be restarted" in log[1]


def fail_to_renew():
    raise MemoryError("no room")


def test_what_can_never_fit_is_refused_at_once_and_leaves_nothing():
    async def body():
        async with served(make_llm(num_blocks=2)) as engine:
            with pytest.raises(ParameterError, match="KV blocks"):
                await read(engine, PROMPTS[0], greedy(max_tokens=100))
            with pytest.raises(ParameterError, match="prompt"):
                await read(engine, "", greedy())
            await emptied(engine)
            assert await read(engine, PROMPTS[0], greedy(max_tokens=3)) == native(PROMPTS[0], greedy(max_tokens=3))

    run(body())


def test_the_queue_is_bounded_and_a_place_in_it_is_free_again_after_an_end():
    async def body():
        async with served(make_llm(max_num_seqs=2), max_queue=1) as engine:
            seqs = [(await engine.prepare([PROMPTS[0]], greedy(max_tokens=300)))[0] for _ in range(4)]
            jobs = [engine.submit([seq]) for seq in seqs[:3]]
            with pytest.raises(QueueFullError, match="beside 3 open completions"):
                engine.submit(seqs[3:])
            with pytest.raises(QueueFullError):
                await engine.prepare(PROMPTS, greedy())
            engine.close(jobs[0])
            with pytest.raises(QueueFullError):
                await engine.prepare([PROMPTS[0]], greedy(n=2))
            jobs[0] = engine.submit(seqs[3:])
            for job in jobs:
                engine.close(job)
            await emptied(engine)

    run(body())


def test_waiting_too_long_and_taking_too_long_end_a_request_with_a_reason():
    async def body():
        async with served(slow_llm(max_num_seqs=1), queue_s=0.05) as engine:
            first = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=400)))
            await asyncio.sleep(0.01)
            with pytest.raises(QueueTimeoutError):
                await read(engine, PROMPTS[1], greedy())
            assert await first == native(PROMPTS[0], greedy(max_tokens=400))
            await emptied(engine)
        async with served(slow_llm(), request_s=0.05) as engine:
            with pytest.raises(DeadlineError):
                await read(engine, PROMPTS[0], greedy(max_tokens=400))
            await emptied(engine)

    run(body())


def test_an_engine_is_free_for_others_after_a_service_that_stopped_at_work():
    llm = slow_llm()

    async def body():
        async with served(llm) as engine:
            engine.trial.running = True
            task = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=400)))
            await asyncio.sleep(0.05)
            assert engine.jobs
        with pytest.raises(StoppedError):
            await task
        assert llm.engine().idle
        assert not llm.engine().trial.running
        async with served(llm) as engine:
            assert await read(engine, PROMPTS[1], greedy(max_tokens=8)) == native(PROMPTS[1], greedy(max_tokens=8))
            assert engine.restarts == 0

    run(body())


def test_draining_lets_requests_end_and_takes_no_more():
    async def body():
        async with served() as engine:
            task = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=60)))
            while not engine.jobs:
                await asyncio.sleep(0.001)
            drained = asyncio.create_task(engine.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(StoppedError):
                await read(engine, PROMPTS[1], greedy())
            assert await drained
            assert await task == native(PROMPTS[0], greedy(max_tokens=60))
        async with served() as engine:
            task = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=480)))
            while not engine.jobs:
                await asyncio.sleep(0.001)
            assert not await engine.drain(0.01)
            await engine.stop()
            with pytest.raises(StoppedError):
                await task

    run(body())


def test_an_engine_that_cannot_be_made_says_why():
    async def body():
        engine = AsyncEngine(make_llm(num_blocks=(1 << 27) - 1))
        with pytest.raises(ParameterError, match="num_blocks"):
            await engine.start()
        await engine.stop()

    run(body())


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.integers(1, 30), st.integers(1, 3), st.none() | st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([14, 24]),
)
def test_any_mix_of_requests_and_aborts_in_a_small_pool_keeps_outputs_and_loses_no_block(requests, num_blocks):
    async def one(engine, prompt, max_tokens, n, stop_after):
        params = seeded(max_tokens=max_tokens, n=n)
        if stop_after is None:
            assert await read(engine, prompt, params) == native(prompt, params)
            return
        async with aclosing(engine.stream(prompt, params)) as stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen > stop_after:
                    break

    async def body():
        async with served(shared_llm("near", num_blocks=num_blocks, block_size=4, max_num_seqs=4)) as engine:
            await asyncio.gather(*(one(engine, *request) for request in requests))
            await emptied(engine)

    run(body())
