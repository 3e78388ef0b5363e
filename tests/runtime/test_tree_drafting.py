"""Trees that the draft model draws: native's tokens when greedy or coupled, native's distribution when sampled."""

from dataclasses import replace

import pytest

from lychee.runtime.checks import ParameterError
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed, Window
from lychee.runtime.cost_table import CostTable
from lychee.runtime.planned import Planned
from lychee.runtime.tree import TreeShape

from .pairs import PROMPTS, greedy, make_llm, seeded

WIDTHS = {"1": (1, 1, 1), "2": (2, 2, 1), "4": (4, 2)}
MANY = [PROMPTS[i % len(PROMPTS)] + " more" * (i // len(PROMPTS)) for i in range(8)]
SLICES = {1: MANY[1:2], 3: MANY[:3], 8: MANY}


def tokens(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module", params=[1, 4, 16])
def llm(request):
    return make_llm("near", block_size=request.param, num_blocks=4096 // request.param, max_num_seqs=8)


@pytest.mark.parametrize("batch", SLICES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("params", [greedy(), seeded()], ids=["greedy", "seeded"])
def test_trees_of_any_width_block_size_and_batch_give_the_tokens_of_native_decoding(llm, params, width, batch):
    engine = llm.engine()
    engine.controller = Fixed(TreeShape.widths(WIDTHS[width]))
    llm.reset_metrics()
    want = tokens(llm.generate(SLICES[batch], params, native=True))
    assert tokens(llm.generate(SLICES[batch], params)) == want
    assert llm.metrics().accepted > 0


@pytest.mark.parametrize("verify", ["coupled", "rejection", "traversal"])
def test_paths_off_the_trunk_are_accepted(verify):
    llm = make_llm("near", config=SpeculativeConfig(tree="4,2", verify=verify), max_num_seqs=8)
    llm.generate(MANY, replace(seeded(), temperature=1.5, seed=3, max_tokens=40))
    metrics = llm.metrics()
    assert metrics.accepted > metrics.trunk_accepted > 0
    assert metrics.accepted <= metrics.drafted


MATRIX = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0}},
    "bad words": {"bad_words": ["the", "e"]},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False},
    "stop": {"stop": ["e"]},
    "copies": {"n": 3},
}


@pytest.mark.parametrize("changes", MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize("params", [greedy(), seeded()], ids=["greedy", "seeded"])
def test_every_sampling_parameter_gives_the_tokens_of_native_decoding(params, changes):
    llm = make_llm("near", config=SpeculativeConfig(tree="3,2,1"), max_num_seqs=8)
    params = replace(params, **changes)
    native = llm.generate(MANY[:3], params, native=True)
    assert tokens(llm.generate(MANY[:3], params)) == tokens(native)


def test_logprobs_of_tokens_off_the_trunk_are_those_of_native_decoding():
    llm = make_llm("near", config=SpeculativeConfig(tree="4,2"), max_num_seqs=8)
    params = seeded(temperature=1.5, logprobs=3)
    for one, other in zip(llm.generate(MANY, params), llm.generate(MANY, params, native=True), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert llm.metrics().accepted > llm.metrics().trunk_accepted


def test_supports_smaller_than_the_children_leave_dead_nodes_and_native_s_tokens():
    llm = make_llm("near", config=SpeculativeConfig(tree="4,4"), max_num_seqs=8)
    for params in (seeded(top_k=1), seeded(top_k=2), seeded(top_p=0.05, temperature=0.5)):
        assert tokens(llm.generate(MANY, params)) == tokens(llm.generate(MANY, params, native=True))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, Planned),
        ({"max_draft_len": 8}, Planned),
        ({"max_draft_len": 0}, Fixed),
        ({"tree": "chain"}, Window),
        ({"adaptive": True}, Window),
        ({"acceptance_threshold": 0.5}, Window),
        ({"num_speculative_tokens": 3}, Fixed),
        ({"tree": "auto"}, Planned),
        ({"tree": "3,2"}, Fixed),
    ],
)
def test_the_option_chooses_the_controller(given, kind):
    controller = make_llm("near", config=SpeculativeConfig(**given)).engine().controller
    assert type(controller) is kind
    if given.get("tree") == "3,2":
        assert controller.shapes == (TreeShape.widths((3, 2)),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tree": "3,x"}, "tree is '3,x', must be auto, chain, or numbers"),
        ({"tree": "9,9"}, "a tree of at most 64 drafted nodes, and this one has 90"),
        ({"tree": "4,2", "node_budget": 8}, "a tree of at most 8 drafted nodes, and this one has 12"),
        ({"node_budget": 8, "tree": "chain"}, "node_budget is 8, must be left out without a tree"),
        ({"tree": "auto", "node_budget": 65}, "node_budget is 65, must be"),
        ({"tree": "4,2", "max_draft_len": 8}, "max_draft_len is 8, must be left out where tree is '4,2'"),
        ({"tree": "auto", "num_speculative_tokens": 4}, "num_speculative_tokens is 4, must be left out where tree is"),
    ],
)
def test_what_a_tree_would_ignore_is_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        SpeculativeConfig(**given)


def test_planned_shapes_change_between_rounds_and_the_tokens_do_not():
    llm = make_llm("near", config=SpeculativeConfig(tree="auto", node_budget=8), max_num_seqs=8)
    llm.warm_up(greedy())
    for params in (greedy(max_tokens=60), seeded(max_tokens=60)):
        assert tokens(llm.generate(MANY, params)) == tokens(llm.generate(MANY, params, native=True))
    assert llm.metrics().rounds > 0


@pytest.mark.parametrize("tree", ["chain", "auto"])
def test_requests_end_with_shapes_that_are_planned_anyway(tree):
    """Others would run op by op, and be lowered for a round or two."""
    llm = make_llm("same", config=SpeculativeConfig(tree=tree, max_draft_len=16), max_num_seqs=8)
    if tree == "auto":
        llm.engine().controller.costs = CostTable.guessed(0.02)
    for max_tokens in (3, *range(30, 60, 3)):
        llm.generate(MANY, greedy(max_tokens=max_tokens))
    controller, seen = llm.engine().controller, llm.metrics().shapes
    assert len(seen) > 2
    assert set(seen) <= set(controller.shapes)


def test_a_fixed_shape_is_cut_where_a_request_has_no_room_for_it():
    llm = make_llm("same", config=SpeculativeConfig(num_speculative_tokens=6))
    llm.generate("Hello", greedy(max_tokens=6))
    assert set(llm.metrics().shapes) == {TreeShape.chain(4)}
