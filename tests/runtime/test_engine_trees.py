"""The engine takes any tree: paths off the trunk are accepted, and both models' KV follows them."""

import pytest
import torch

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ModelDrafter, Proposals
from lychee.runtime.tree import ProposedTree, TreeShape
from tests.runtime.pairs import PROMPTS, following, greedy, make_llm, seeded

SHAPE = TreeShape((-1, 0, 0, 1, 2, 2, 4, 5))  # the right path is the last child's at every node: 0, 2, 5, 7
RIGHT = (0, 2, 5, 7)


class Planned:
    """A controller that wants SHAPE in every round."""

    shapes = (SHAPE,)

    def plan(self, request_ids):
        return [SHAPE] * len(request_ids)

    goes_on = None

    def observe(self, request_id, tree, path, emitted): ...

    def timed(self, trees, draft_ms, verify_ms, other_ms): ...

    def forget(self, request_id): ...


class TreeDrafter(ModelDrafter):
    """Puts right tokens on last children and wrong ones elsewhere; past the depth `blur` all are wrong."""

    script, blur = None, 99

    def propose(self, batch, shapes, goes_on=None):
        trees = []
        for seq, shape in zip(batch.seqs, shapes, strict=True):
            known = self.script(seq, shape.depth)
            right, tokens = {0}, [seq.tokens[-1]]
            for node in range(1, shape.num_nodes):
                parent, depth = shape.parents[node], shape.depths[node]
                last = node == max(n for n, p in enumerate(shape.parents) if p == parent)
                on_path = parent in right and last and depth <= len(known) and depth <= self.blur
                if on_path:
                    right.add(node)
                token = known[depth - 1] if depth <= len(known) else 0
                tokens.append(token if on_path else (token + node) % self.vocab)
            trees.append(ProposedTree(shape, tuple(tokens)))
        return Proposals(tuple(trees))


@pytest.fixture
def llm():
    llm = make_llm(draft="near", block_size=4)
    engine = llm.engine()
    engine.controller, engine.drafter.__class__ = Planned(), TreeDrafter
    return llm


@pytest.mark.parametrize("blur", [0, 1, 2, 99])
@pytest.mark.parametrize("params", [greedy(max_tokens=30), seeded(max_tokens=30)], ids=["greedy", "seeded"])
def test_a_path_off_the_trunk_gives_the_tokens_of_native_decoding(llm, params, blur):
    reference = llm.generate(PROMPTS, params, native=True)
    drafter = llm.engine().drafter
    drafter.script, drafter.blur = following(reference), blur
    outputs = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in reference]
    emitted = llm.metrics().totals()["mean_emitted_per_round"]
    assert emitted == 1 if blur == 0 else emitted > 1 + 0.8 * min(blur, 3)


def test_both_models_kv_moves_with_the_accepted_path(llm):
    engine = llm.engine()
    engine.drafter.script = following(llm.generate(PROMPTS[:1], greedy(max_tokens=30), native=True))
    stream = llm.stream(PROMPTS[0], greedy(max_tokens=30))
    next(stream)
    (seq,) = engine.scheduler.running
    start = seq.cached
    draft = engine.drafter.kv.storage
    draft.copy_(torch.arange(draft.shape[2])[None, None, :, None, None].expand_as(draft))
    next(stream)
    assert seq.cached == start + len(RIGHT)

    def slot(place):
        return seq.blocks[place // 4] * 4 + place % 4

    for depth in (0, 1):  # further nodes' slots may lie in blocks that were given back
        moved_from = draft[:, :, slot(start + depth)].unique().tolist()
        assert moved_from == [slot(start + RIGHT[depth])]
    stream.close()


def test_a_controller_is_told_all_that_a_round_takes():
    llm = make_llm("near", config=SpeculativeConfig(num_speculative_tokens=3))
    engine, told = llm.engine(), []

    class Told(Fixed):
        def timed(self, trees, draft_ms, verify_ms, other_ms):
            told.append((draft_ms, verify_ms, other_ms))

    engine.controller = Told(engine.controller.shape)
    llm.generate(PROMPTS[0], greedy(max_tokens=20))
    assert told
    assert min(min(parts) for parts in told) > 0
    assert sum(map(sum, told)) < 1e3 * engine.metrics.step_s
