"""Any schedule of requests with shared prefixes, over models whose KV is the text it was made of."""

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lychee.runtime.blocks import BlockPool
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.metrics import RequestStats
from lychee.runtime.prefix_cache import PrefixCache
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.scheduler import Scheduler
from lychee.runtime.sequence import Mode, Sequence

BLOCK, BLOCKS, BUDGET, LIMIT = 2, 9, 5, 14  # a sequence of LIMIT tokens needs seven blocks
SALTS = ("", "other")
TOKENS = st.sampled_from([0, 0, 0, 1])
PROMPTS = [[0] * 4, [0] * 8, [0] * 7, [0, 0, 0, 0, 1, 1], [0, 1, 1, 0], [1]]


def sequence(seq_id, request_id, prompt, salt, leader):
    known = (seq_id, request_id, 0, tuple(prompt), SamplingParams(), Mode.GREEDY, 0, LIMIT, frozenset(), (), None)
    return Sequence(*known, RequestStats(), leader=leader, cache_salt=salt)


class Storage:
    """By slot, the tokens up to the one whose KV it is. A pass may only read what is right, and write what it owns."""

    def __init__(self, pool):
        self.pool, self.slots = pool, {}

    def at(self, seq, position):
        return seq.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def holds(self, seq, count):
        return all(self.slots.get(self.at(seq, i)) == (seq.cache_salt, *seq.tokens[: i + 1]) for i in range(count))

    def write(self, slot, text, first=BLOCK):
        """first: from which slot of a block on others count on nothing."""
        block = slot // BLOCK
        is_private = self.pool._refs[block] == 1 and block not in self.pool._keys
        assert is_private or slot % BLOCK >= first, "a shared block is written"
        self.slots[slot] = text

    def copy(self, source, destination):
        for i in range(BLOCK):
            self.slots[destination * BLOCK + i] = self.slots.get(source * BLOCK + i)


class Schedules(RuleBasedStateMachine):
    """Rounds accept any path of a tree of chains; `draft` is a ModelDrafter whose passes note what they are given."""

    keeps = True

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK, keeps=self.keeps)
        self.scheduler = Scheduler(self.pool, 3, BUDGET, BUDGET - 2)
        self.target, self.draft = Storage(self.pool), Storage(self.pool)
        self.by_salt = {salt: set() for salt in SALTS}  # what was computed with it
        self.drafter = SimpleNamespace(
            pool=self.pool, max_num_batched_tokens=BUDGET, kv=self.pool, compiled=SimpleNamespace(forward=self.prefill)
        )
        self.drafter._lag = partial(ModelDrafter._lag, self.drafter)
        self.drafter._stop = partial(ModelDrafter._stop, self.drafter)
        self.live, self.ids = [], 0

    @rule(
        prompt=st.sampled_from(PROMPTS),
        salt=st.sampled_from(SALTS),
        n=st.integers(1, 2),
        speculates=st.booleans(),
    )
    def add(self, prompt, salt, n, speculates):
        leader, first = None, self.ids
        for _ in range(n):
            seq = sequence(self.ids, first, prompt, salt, leader)
            seq.speculates = speculates
            leader, self.ids = leader or seq, self.ids + 1
            self.scheduler.add(seq)
            self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.end(self.live[which % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def step(self, data, steps):
        for _ in range(steps):
            work = self.scheduler.next()
            for seq in work.admitted:
                if seq in self.scheduler.running:
                    self.check_hit(seq)
            for source, destination in work.copies:
                self.target.copy(source, destination)
                self.draft.copy(source, destination)
            for chunk in work.chunks:
                self.compute(chunk.seq, chunk.start, chunk.stop)
                chunk.seq.cached = min(chunk.stop, len(chunk.seq.tokens) - 1)
                self.scheduler.prefixes.publish(chunk.seq)
            for chunk in work.chunks:
                if chunk.stop == len(chunk.seq.tokens):
                    self.emit(chunk.seq, [data.draw(TOKENS)])
            self.round(data, work.decode)

    def round(self, data, seqs):
        drafted = {seq: data.draw(st.integers(0, 3)) if seq.speculates else 0 for seq in seqs}
        drafted = {seq: min(self.scheduler.extend(seq, count + 1) - 1, count) for seq, count in drafted.items()}
        ModelDrafter._catch_up(self.drafter, [seq for seq, count in drafted.items() if count], whole=True)
        for seq, count in drafted.items():
            accepted = [data.draw(TOKENS) for _ in range(data.draw(st.integers(0, count)))]
            rejected = [2] * (count - len(accepted))
            root, salt = seq.cached, seq.cache_salt
            assert self.target.holds(seq, root)
            text = [*seq.tokens, *accepted, *rejected]
            for i in range(root, root + count + 1):
                self.target.write(self.target.at(seq, i), (salt, *text[: i + 1]))
            self.by_salt[salt].update(tuple(text[: i + 1]) for i in range(len(text) - len(rejected)))
            if count:
                assert self.draft.holds(seq, root - 1)
                for i in range(root - 1, root + count):  # the last is drawn, and not run
                    self.draft.write(self.draft.at(seq, i), (salt, *text[: i + 1]))
                seq.draft_cached = root + len(accepted) + 1 - (len(accepted) == count)
            self.emit(seq, [*accepted, data.draw(TOKENS)])

    def emit(self, seq, tokens):
        seq.tokens += tokens[: LIMIT - len(seq.tokens)]
        seq.cached = len(seq.tokens) - 1
        if len(seq.tokens) == LIMIT:
            self.end(seq)
        else:
            self.scheduler.settle(seq)

    def end(self, seq):
        self.scheduler.finish(seq)
        self.live.remove(seq)

    def compute(self, seq, start, stop):
        assert self.target.holds(seq, start)
        for i in range(start, stop):
            self.target.write(self.target.at(seq, i), (seq.cache_salt, *seq.tokens[: i + 1]))
            self.by_salt[seq.cache_salt].add(tuple(seq.tokens[: i + 1]))

    def prefill(self, rows):
        """The draft's passes: whose they are is found by their blocks."""
        by_table = {tuple(seq.blocks): seq for seq in self.scheduler.running}
        assert len(set(rows.slots.tolist())) == len(rows.slots)
        for slot, position, nth in zip(rows.slots, rows.positions, rows.layout.seq_idx, strict=True):
            (seq,) = {
                s for table, s in by_table.items() if list(table) == rows.block_tables[nth][: len(table)].tolist()
            }
            assert self.draft.holds(seq, int(rows.context_lens[nth]))
            text = (seq.cache_salt, *seq.tokens[: position + 1])
            self.draft.write(int(slot), text, first=self.pool.drafted[slot // BLOCK])

    def check_hit(self, seq):
        """Admitted just now, by what was computed with its own salt."""
        assert seq.cached < len(seq.tokens)
        assert seq.draft_cached <= seq.cached
        assert all(tuple(seq.tokens[: i + 1]) in self.by_salt[seq.cache_salt] for i in range(seq.cached))

    @invariant()
    def every_block_is_accounted_for(self):
        pool, running = self.pool, self.scheduler.running
        held = [block for seq in running for block in seq.blocks]
        assert pool._refs == [held.count(block) for block in range(BLOCKS)]
        free, idle = pool._free, list(pool._idle)
        assert sorted([*free, *idle, *set(held)]) == list(range(BLOCKS))
        assert set(idle) <= pool._keys.keys() <= set(idle) | set(held)
        assert {key: block for block, key in pool._keys.items()} == pool._named
        assert all(not seq.blocks for seq in self.scheduler.waiting)

    @invariant()
    def what_sequences_and_others_count_on_is_there(self):
        for seq in self.scheduler.running:
            if not any(seq is s for s in self.live):
                continue
            assert self.target.holds(seq, seq.cached)
            assert self.draft.holds(seq, min(seq.draft_cached, seq.cached))

    @invariant()
    def published_blocks_hold_what_their_keys_say(self):
        for block, key in self.pool._keys.items():
            first = block * BLOCK
            salt, *tokens = self.target.slots[first + BLOCK - 1]
            if self.keeps:
                assert (
                    self.scheduler.prefixes._keys(sequence(0, 0, tokens, salt, None), len(tokens) // BLOCK)[-1] == key
                )
            for i in range(BLOCK):
                text = (salt, *tokens[: len(tokens) - BLOCK + 1 + i])
                assert self.target.slots[first + i] == text
                assert i >= self.pool.drafted[block] or self.draft.slots[first + i] == text

    def teardown(self):
        for seq in list(self.live):
            self.end(seq)
        assert self.pool.num_free == BLOCKS


class Apart(Schedules):
    """Without keeping."""

    keeps = False

    @invariant()
    def nothing_is_kept(self):
        assert not self.pool._idle


def settled(self, seq, ended=False):
    return PUBLISH(self, seq, ended=True)


def all_drafted(self, seq):
    return seq.cached


def unsalted(self, seq):
    return b"root"


def without_parents(self, seq, count):
    return [bytes(seq.tokens[i * BLOCK : (i + 1) * BLOCK]) for i in range(count)]


def careless(self, hit):
    return self.pool.num_free


def shares_the_last(self, seq, hit):
    seq.blocks = self.pool.share([*hit.shared, *([] if hit.last is None else [hit.last])])
    seq.cached, seq.published = hit.cached, len(hit.shared)
    seq.draft_cached = self._drafted(seq)


PUBLISH = PrefixCache.publish
FAULTS = {
    "publish": settled,
    "_drafted": all_drafted,
    "_root": unsalted,
    "_keys": without_parents,
    "room": careless,
    "take": shares_the_last,
}


@pytest.mark.parametrize("method", FAULTS)
def test_a_fault_is_found(method, monkeypatch):
    monkeypatch.setattr(PrefixCache, method, FAULTS[method])
    with pytest.raises((AssertionError, MemoryError, ValueError)):
        run_state_machine_as_test(Schedules, settings=settings(FOUND, phases=[Phase.generate]))


@pytest.mark.slow
def test_many_more_schedules():
    run_state_machine_as_test(Schedules, settings=settings(FOUND, max_examples=3000))


FOUND = settings(derandomize=True, max_examples=120, stateful_step_count=30, deadline=None)
TestSchedules = Schedules.TestCase
TestSchedules.settings = FOUND
TestApart = Apart.TestCase
TestApart.settings = settings(FOUND, max_examples=20)
