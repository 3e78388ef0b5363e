"""Costs of a program are those of its calls at the sizes and inputs given; floors are what measured peaks allow."""

import torch

from lychee.compiler import Size, Tracer, lower, trace
from lychee.compiler.cost import Peaks, costs, measure_peaks
from lychee.compiler.profile import fastest, profile
from lychee.kernels import attention
from lychee.kernels.types import Cost, Paging
from tests.compiler.test_lower import DOWN, PROGRAM, some


def test_a_program_costs_what_its_calls_cost_on_tensors_of_these_sizes():
    found = costs(PROGRAM, {"num_tokens": 5}, [some(5, 0)])
    assert len(found) == len(PROGRAM.calls)
    assert found[0] == Cost(0, 5 * 4 + 2 * 5 * 24 * 4)
    down = found[[call.op.name for call in PROGRAM.calls].index("swiglu") + 1]
    assert down == Cost(2 * 5 * 40 * 24, 4 * (5 * 40 + DOWN.numel() + 5 * 24))


def test_what_attention_reads_is_counted_from_the_elements_of_the_inputs():
    keys, values = torch.zeros(2, 64, 2, 8, dtype=torch.float16)

    def function(tracer: Tracer):
        q = tracer.tensor("q", (Size("num_tokens"), 4, 8), torch.float16)
        paging = tracer.struct(Paging, block_size=16, max_rows=3, max_context=30)
        return attention(
            q, keys, values, paging, tracer.tensor("ancestors", (Size("num_tokens"), 3), torch.int32), 1.0, 0
        )

    program = trace(function, "cpu")
    rows = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 1, 2]], dtype=torch.int32)
    sizes = {"num_tokens": 3, "num_seqs": 1, "max_blocks": 4}
    blank = torch.zeros(3, 4, 8, dtype=torch.float16)
    paging = [torch.tensor(t, dtype=torch.int32) for t in ([0, 3], [0, 0, 0], [30], [[0, 1, 2, 3]])]
    (found,) = costs(program, sizes, [blank, *paging, rows])
    slot, read = 2 * 8 * 2, 30 + 1 + 2 + 3
    assert found == Cost(4 * (3 * 30 + 6) * 4 * 8, 2 * read * slot + 2 * blank.nbytes)


def test_a_floor_is_the_slower_of_memory_and_arithmetic():
    peaks = Peaks("device", bytes_per_s=100.0, flops_per_s={"float32": 1000.0})
    assert peaks.floor(Cost(flops=1000, bytes=500), "float32") == 5.0
    assert peaks.floor(Cost(flops=9000, bytes=500), "float32") == 9.0


def test_peaks_are_the_fastest_of_what_is_timed():
    seconds = iter([4.0, 2.0, 8.0, 5.0, 0.5])
    ran = []

    def timed(call):
        ran.append(call())
        return next(seconds)

    peaks = measure_peaks([torch.float32], timed, "cpu", 1 << 16, 32)
    assert peaks.bytes_per_s == (1 << 16) / 2.0
    assert peaks.flops_per_s == {"float32": 2 * 32**3 / 0.5}
    assert len(ran) == 5


def test_peaks_of_this_machine_are_measured():
    peaks = measure_peaks([torch.float32], fastest, "cpu", 1 << 20, 64)
    assert 1e7 < peaks.bytes_per_s < 1e13
    assert 1e7 < peaks.flops_per_s["float32"] < 1e14


def test_each_call_is_timed_by_its_own_launches_and_the_program_still_computes():
    lowered = lower(PROGRAM, {"num_tokens": 300})
    assert len(lowered.steps) == len(PROGRAM.calls)
    assert all(lowered.steps)
    lowered.inputs[0].copy_(some(300, 1))
    lowered.replay()
    want = lowered.results[0].clone()
    lowered.results[0].zero_()
    found = profile(lowered, 0.0, 1 << 12)
    assert torch.equal(lowered.results[0], want)
    assert len(found.calls) == len(PROGRAM.calls)
    assert all(seconds >= 0 for seconds in found.calls)
    assert 0 < sum(found.calls) < 1000 * found.replay
