"""The share of a canary is taken back where drafting is slower or fails more, and nowhere else."""

import threading
import time

import numpy as np
import pytest

from lychee.runtime.trial import Trial
from lychee.serve.channel import Channel
from lychee.serve.config import Margins
from lychee.serve.guard import LEAST_PAIRS, Guard
from lychee.serve.job import DeadlineError, EngineFailedError
from tests.serve.running import MODEL, packaged, serving

ADMIN = {"authorization": "Bearer the-admin"}


class World:
    """A clock, a guard, and rounds of one request that is drafted for."""

    def __init__(self, share=0.1, seed=0, **margins):
        self.now, self.log, self.draws = 0.0, [], np.random.default_rng(seed)
        self.trial = Trial(clock=lambda: self.now)
        self.guard = Guard(Channel(share), self.trial, Margins(**margins), self.log.append, lambda: self.now)

    def round(self, speedup, noise=0.3, channels=(True, False)):
        drafted = self.trial.drafts
        seconds = 0.01 * self.draws.lognormal(0, noise)
        self.now += seconds
        self.trial.add(drafted, 1, 3 if drafted else 1, seconds * (3 / speedup if drafted else 1))
        for speculates in channels:
            self.guard.served(speculates)

    def run(self, seconds, *args, **given):
        """Whether it was still watching afterwards, and for how long it ran."""
        begin = self.now
        while self.now < begin + seconds and self.trial.running:
            self.round(*args, **given)
        return self.trial.running, self.now - begin


def test_a_slow_draft_is_taken_back_within_a_minute_and_why_is_told():
    world = World()
    running, taken = world.run(60, speedup=0.7)
    assert (running, world.guard.channel.share) == (False, 0.0)
    assert 0 < taken < 60
    verdict = world.guard.verdict
    assert (verdict.state, verdict.cause) == ("rolled back", "goodput")
    assert "0.90 is the least allowed" in verdict.reason
    (entry,) = world.log
    assert (entry["event"], entry["share"], entry["reason"]) == ("rollback", 0.1, verdict.reason)
    assert world.guard.rollbacks == {"goodput": 1}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("speedup", [0.95, 1.0, 1.5])
def test_a_draft_as_good_stays_for_half_an_hour_of_noise(speedup, seed):
    world = World(seed=seed)
    for _ in range(12 * LEAST_PAIRS * 32):
        world.round(speedup, noise=0.8)
        world.now += 0.05
    assert world.guard.channel.share == 0.1
    assert world.guard.verdict.state == "as good"
    assert world.log == []


def test_a_draft_that_becomes_slow_after_ten_minutes_is_taken_back_within_a_minute():
    world = World()
    assert world.run(600, speedup=1.5, noise=0.0)[0]
    running, taken = world.run(60, speedup=0.7)
    assert not running
    assert taken < 60


def test_a_wider_margin_keeps_what_a_narrow_one_takes_back():
    assert World(goodput=0.1).run(60, speedup=0.7)[0] is False
    assert World(goodput=0.5).run(60, speedup=0.7)[0] is True
    assert World(goodput=1.0).run(60, speedup=0.1)[0] is True


@pytest.mark.parametrize("channel", [True, False])
def test_without_traffic_of_one_channel_nothing_is_done(channel):
    world = World()
    if channel:
        world.run(60, speedup=0.1, channels=(True,))
    for _ in range(50):
        world.now += 1
        world.guard.served(channel)
        world.guard.ended(channel, DeadlineError("late") if channel else None)
    assert world.guard.channel.share == 0.1
    assert world.guard.verdict.state == "not enough data"
    assert ("native" if channel else "speculative") in world.guard.verdict.reason


def test_what_is_older_than_the_window_does_not_count():
    world = World(window_s=10.0)
    world.run(0.01 * 32 * (LEAST_PAIRS - 1), speedup=0.5, noise=0.0)
    world.now += 11
    world.guard.served(True)
    world.guard.served(False)
    world.run(3, speedup=0.5, noise=0.0)
    assert world.guard.channel.share == 0.1


def ends(world, speculative, native, error=None):
    """So many requests of each channel fail, of 20 of each."""
    for i in range(20):
        world.now += 1
        for speculates, failed in ((True, speculative), (False, native)):
            world.guard.served(speculates)
            world.guard.ended(speculates, (error or DeadlineError("late")) if i < failed else None)


@pytest.mark.parametrize(
    ("speculative", "native", "kept"), [(20, 0, False), (12, 0, False), (2, 0, True), (9, 9, True)]
)
def test_more_errors_of_the_drafted_channel_take_it_back(speculative, native, kept):
    world = World()
    ends(world, speculative, native)
    assert (world.guard.channel.share == 0.1) is kept
    assert world.guard.rollbacks == ({} if kept else {"errors": 1})


def test_an_engine_that_fails_while_it_drafts_is_the_drafted_channels_error_alone():
    for accelerated, kept in ((True, False), (False, True)):
        world = World()
        ends(world, 10, 10, EngineFailedError("it failed", accelerated))
        assert (world.guard.channel.share == 0.1) is kept


def test_a_new_share_begins_anew():
    world = World()
    world.run(60, speedup=0.5)
    world.guard.set_share(0.2)
    assert world.guard.verdict.state == "not enough data"
    assert world.trial.running
    for share in (0.0, 1.0):
        world.guard.set_share(share)
        assert world.guard.verdict.state == "off"
        assert not world.trial.running


class Traffic:
    """Clients that complete, one after the other, each for one user of whom half are drafted for."""

    def __init__(self, running, clients=6):
        self.running, self.answers, self.going = running, [], True
        self.threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]

    def _client(self, i):
        body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "speculative": i % 2 == 0}
        while self.going:
            self.answers.append(self.running.complete(**body)[0])

    def until(self, done):
        for _ in range(3000):
            if done():
                return
            time.sleep(0.02)
        pytest.fail(str(self.running.service.guard.verdict))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.going = False
        for thread in self.threads:
            thread.join(60)


def slowed(function, seconds):
    def slow(*args, **given):
        time.sleep(seconds())
        return function(*args, **given)

    return slow


def test_a_draft_that_becomes_slow_is_taken_back_and_no_request_is_lost(monkeypatch):
    draft_s = 0.0
    with serving(packaged(), admin_key="the-admin", speculation_share=0.5) as running:
        guard, engine, trial = running.service.guard, running.service.engine.engine, running.service.engine.trial
        trial.drafted, trial.plain = 3, 1
        # A pass takes so long that drafts pay and that what else the machine does is little beside it.
        monkeypatch.setattr(engine.verifier, "run", slowed(engine.verifier.run, lambda: 0.003))
        monkeypatch.setattr(engine.drafter, "propose", slowed(engine.drafter.propose, lambda: draft_s))
        with Traffic(running) as traffic:
            traffic.until(lambda: guard.verdict.state == "as good")
            assert guard.channel.share == 0.5
            draft_s = 0.04
            running.ask("POST", "/admin/speculation", {"share": 0.5}, ADMIN)  # good rounds are forgotten: a faster test
            traffic.until(lambda: guard.channel.share == 0.0)
            told = running.ask("GET", "/admin/speculation", headers=ADMIN)[2]
        assert set(traffic.answers) == {200}
        assert (told["share"], told["guard"]["state"]) == (0.0, "rolled back")
        assert 0 < told["guard"]["goodput_ratio"] < 0.9
        metrics = running.ask("GET", "/metrics")[2]
        assert f'lychee:speculation_rollbacks_total{{cause="goodput",model_name="{MODEL}"}} 1.0' in metrics
        assert told["guard"]["reason"] in metrics
        assert [e["reason"] for e in running.log if e.get("event") == "rollback"] == [told["guard"]["reason"]]
        running.settled()


def test_a_draft_that_fails_is_taken_back_by_its_own_errors(monkeypatch):
    llm = packaged(tree="chain")  # `auto` may find that drafting does not pay, and a draft unused does not fail
    with serving(llm, speculation_share=0.5) as running:
        guard, renew = running.service.guard, llm.renew_engine

        def broken(*_):
            raise RuntimeError("the draft is broken")

        def renewed():
            engine = renew()
            monkeypatch.setattr(engine.drafter, "propose", broken)
            return engine

        running.service.engine._stepper._renew = renewed
        with Traffic(running, clients=4) as traffic:
            traffic.until(lambda: len(traffic.answers) > 3)
            monkeypatch.setattr(running.service.engine.engine.drafter, "propose", broken)
            traffic.until(lambda: guard.channel.share == 0.0)
        assert guard.verdict.cause == "errors"
        assert running.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "a"})[0] == 200
        running.settled()
    llm.renew_engine()
