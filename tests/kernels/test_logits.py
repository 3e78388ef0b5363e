"""process_logits: every filter, penalty and ban by itself, at its edges, and in mixed batches."""

import pytest
import torch
from transformers.generation import logits_process as hf

from lychee.kernels import draw, process_logits
from lychee.kernels.philox import TARGET
from lychee.kernels.types import PROMPT_BIT, NoiseKeys, SamplingRows, SamplingTensors
from tests.conftest import DEVICE
from tests.kernels.faces import both_faces, reference

NEVER = float("-inf")
PROMPT = 1 << PROMPT_BIT
OFF = {
    "temperature": [1.0],
    "top_k": [0],
    "top_p": [1.0],
    "min_p": [0.0],
    "repetition_penalty": [1.0],
    "presence_penalty": [0.0],
    "frequency_penalty": [0.0],
    "min_position": [0],
}
LISTS = {"stop_ids": (1, 0), "bias_ids": (1, 0), "bias": (1, 0), "bad_words": (1, 0, 1)}


def tensor(values, floating: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32 if floating else torch.int32, device=DEVICE)


def params(**given) -> SamplingTensors:
    """Sampling tensors of as many sequences as the given lists have; everything else is off."""
    num_seqs = max((len(v) for v in given.values()), default=1)
    values = {k: tensor(given.get(k, off * num_seqs), isinstance(off[0], float)) for k, off in OFF.items()}
    for name, shape in LISTS.items():
        empty = torch.empty(
            (num_seqs, *shape[1:]), dtype=torch.float32 if name == "bias" else torch.int32, device=DEVICE
        )
        values[name] = tensor(given[name], name == "bias") if name in given else empty
    counts = given.get("token_counts")
    return SamplingTensors(**values, token_counts=None if counts is None else tensor(counts, False))


def rows_of(num_rows: int, seq_idx=None, positions=None, depths=None, recent=None) -> SamplingRows:
    zeros = [0] * num_rows
    recent = [[-1]] * num_rows if recent is None else recent
    return SamplingRows(*(tensor(v, False) for v in (seq_idx or zeros, positions or zeros, depths or zeros, recent)))


def process(face, logits, sampling: SamplingTensors, rows: SamplingRows | None = None, vocab: int | None = None):
    logits = torch.as_tensor(logits, dtype=torch.float32, device=DEVICE)
    rows = rows or rows_of(len(logits))
    return face(process_logits, logits=logits, rows=rows, sampling=sampling, vocab=vocab or logits.shape[1])


def random_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


def kept(log_probs) -> list[list[int]]:
    return [[i for i, value in enumerate(row) if value > NEVER] for row in log_probs.tolist()]


@both_faces
@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-5, 1e-6, 1e-12, 0.0])
def test_low_temperatures_and_huge_logits_give_no_nan_and_keep_the_argmax(face, temperature):
    logits = [[-60000.0, 60000.0, 59000.0, 0.0], [0.0, -60000.0, -60000.0, 60000.0], [60000.0, NEVER, 0.0, NEVER]]
    sampling = params(temperature=[temperature], top_p=[0.9], top_k=[3], min_p=[0.01])
    log_probs = process(face, logits, sampling)
    assert not log_probs.isnan().any()
    assert log_probs.argmax(-1).tolist() == [1, 3, 0]
    zeros = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    keys = NoiseKeys(zeros.long(), zeros, zeros, zeros, zeros.bool())
    assert draw(log_probs, keys, 1, TARGET, False)[:, 0].tolist() == [1, 3, 0]


@both_faces
def test_a_temperature_below_1e_5_is_greedy(face):
    logits = random_logits(2, 50)
    filters = {"top_k": [2], "top_p": [0.5], "min_p": [0.3]}
    greedy = logits - logits.amax(-1, keepdim=True)
    for temperature in (0.0, 1e-12, 9.9e-6):
        assert torch.equal(process(face, logits, params(temperature=[temperature], **filters)), greedy)
    assert kept(process(face, logits, params(temperature=[1.01e-5], **filters))) == [
        [row] for row in logits.argmax(-1).tolist()
    ]


@both_faces
@pytest.mark.parametrize(
    "off", [{"top_k": [0]}, {"top_k": [50]}, {"top_k": [10**6]}, {"top_p": [1.0]}, {"min_p": [0.0]}]
)
def test_filters_that_are_off_keep_everything(face, off):
    logits = random_logits(3, 50)
    torch.testing.assert_close(process(face, logits, params(**off)), logits.log_softmax(-1))


@both_faces
@pytest.mark.parametrize("vocab", [1, 2, 1025, 4095, 4096, 4097])
def test_top_k_keeps_the_k_largest(face, vocab):
    logits = random_logits(2, vocab)
    for k in (1, 2, 7):
        largest = logits.topk(min(k, vocab)).indices.sort(-1).values.tolist()
        assert kept(process(face, logits, params(top_k=[k]))) == largest


@both_faces
def test_values_tied_at_the_edge_of_top_k_all_stay(face):
    assert kept(process(face, [[1.0, 3.0, 1.0, 0.0, 1.0]], params(top_k=[2]))) == [[0, 1, 2, 4]]


@both_faces
@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-6, [2]), (0.49, [2]), (0.51, [0, 2, 3]), (0.89, [0, 2, 3]), (0.91, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_values_with_less_than_top_p_strictly_above_them(face, top_p, expected):
    """Probabilities 0.5, then 0.2 twice, which stay or go together, then 0.1."""
    assert kept(process(face, torch.tensor([[0.2, 0.1, 0.5, 0.2]]).log(), params(top_p=[top_p]))) == [expected]


@both_faces
def test_min_p_is_relative_to_the_likeliest_token(face):
    logits = torch.tensor([[0.5, 0.26, 0.24]]).log()
    assert kept(process(face, logits, params(min_p=[0.5]))) == [[0, 1]]
    assert kept(process(face, logits, params(min_p=[1.0]))) == [[0]]


@both_faces
def test_top_p_measures_what_min_p_and_top_k_left(face):
    """0.4 of 0.7 is more than half: with top_k 2 one token holds the mass that it does not hold by itself."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(process(face, logits, params(top_p=[0.5]))) == [[0, 1]]
    assert kept(process(face, logits, params(top_p=[0.5], top_k=[2]))) == [[0]]
    assert kept(process(face, logits, params(top_p=[0.5], min_p=[0.6]))) == [[0]]


@pytest.mark.parametrize("seed", range(12))
def test_filters_agree_with_sorting_warpers(seed):
    """Where no values tie, transformers' sort-based warpers in the same order."""
    logits, generator = random_logits(3, 300, seed), torch.Generator().manual_seed(seed)
    temperature, min_p, top_p = (0.4 + torch.rand(3, generator=generator) * torch.tensor([1.0, 0.02, 0.55])).tolist()
    min_p, top_k = min_p - 0.4, int(torch.randint(1, 320, (), generator=generator))
    scores = logits
    for warper in (
        hf.TemperatureLogitsWarper(temperature),
        hf.MinPLogitsWarper(min_p),
        hf.TopKLogitsWarper(top_k),
        hf.TopPLogitsWarper(top_p),
    ):
        scores = warper(None, scores)
    sampling = params(temperature=[temperature], min_p=[min_p], top_k=[top_k], top_p=[top_p])
    torch.testing.assert_close(process(reference, logits, sampling), scores.log_softmax(-1))


@both_faces
def test_rows_of_a_mixed_batch_equal_the_same_rows_alone(face):
    """Greedy, plain and filtered sequences beside each other, two rows each; -1 and 0 switch top_k off per row."""
    logits = random_logits(8, 1100)
    mixed = {
        "temperature": [0.0, 1.0, 0.7, 1e-3],
        "top_k": [5, 0, -1, 2000],
        "top_p": [0.5, 1.0, 0.8, 0.9],
        "min_p": [0.3, 0.0, 0.0, 0.1],
        "presence_penalty": [0.0, 1.5, 0.0, 0.5],
        "token_counts": torch.randint(0, 2, (4, 1100), generator=torch.Generator().manual_seed(1)).tolist(),
    }
    seqs = [0, 1, 2, 3, 3, 2, 1, 0]
    together = process(face, logits, params(**mixed), rows_of(8, seq_idx=seqs))
    for row, seq in enumerate(seqs):
        alone = process(face, logits[row : row + 1], params(**{k: v[seq : seq + 1] for k, v in mixed.items()}))
        assert torch.equal(together[row : row + 1], alone)


def penalised_by_hand(logits, prompt, output, repetition, presence, frequency):
    scores = list(logits)
    for token in set(prompt) | set(output):
        scores[token] *= repetition if scores[token] < 0 else 1 / repetition
    for token in set(output):
        scores[token] -= presence + frequency * output.count(token)
    return scores


@both_faces
def test_penalties_see_the_prefix_and_the_rows_own_path_only(face):
    """A root and two siblings with one child: each row counts its own ancestors, never another branch."""
    prompt, emitted = [1, 1, 2], [3, 3, 4]
    counts = [0] * 10
    for token in emitted:
        counts[token] += 1
    for token in set(prompt):
        counts[token] |= PROMPT
    paths = [[], [5], [6], [6, 6]]
    recent = [([9, *prompt, *emitted, *path])[-4:] for path in paths]
    logits = random_logits(4, 10)
    penalties = {"repetition": 1.3, "presence": 0.4, "frequency": 0.7}
    sampling = params(token_counts=[counts], temperature=[0.0], **{f"{k}_penalty": [v] for k, v in penalties.items()})
    got = process(face, logits, sampling, rows_of(4, depths=[len(p) for p in paths], recent=recent))
    for row, path in enumerate(paths):
        want = torch.tensor(penalised_by_hand(logits[row].tolist(), prompt, emitted + path, **penalties))
        torch.testing.assert_close(got[row].cpu(), want - want.max())


@both_faces
def test_the_prompt_counts_for_the_repetition_penalty_only(face):
    sampling = params(
        token_counts=[[PROMPT, PROMPT, 1, 0]], temperature=[0.0], presence_penalty=[2.0], repetition_penalty=[2.0]
    )
    got = process(face, [[4.0, -4.0, 8.0, 5.0]], sampling)
    assert got.tolist() == [[-3.0, -13.0, -3.0, 0.0]]


@both_faces
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_biased_token_moves_and_a_banned_one_has_no_probability(face, temperature):
    """Even if it is biased twice, is the argmax, or is listed beside padding."""
    sampling = params(bias_ids=[[3, 1, -1, 3, 1]], bias=[[NEVER, 0.5, NEVER, 9.0, 0.5]], temperature=[temperature])
    got = process(face, [[0.0, 1.0, 0.0, 90.0]], sampling)
    assert kept(got) == [[0, 1, 2]]
    torch.testing.assert_close(got[0, 1] - got[0, 0], torch.tensor(2.0, device=DEVICE))


@both_faces
def test_bad_words_ban_their_last_token_where_the_others_just_passed(face):
    """Words 7 | 5 6 | 4 5 6 7 | 9 9 9 9; the last is longer than what a row remembers can match."""
    words = [[[-1, -1, -1, 7], [-1, -1, 5, 6], [4, 5, 6, 8], [-1, -1, -1, -1]]]
    recent = [[-1, -1, 5], [4, 5, 6], [0, 5, 6], [5, 0, 5], [-1, -1, -1]]
    got = process(face, torch.zeros(5, 10), params(bad_words=words), rows_of(5, recent=recent))
    banned = [sorted(set(range(10)) - set(tokens)) for tokens in kept(got)]
    assert banned == [[6, 7], [7, 8], [7], [6, 7], [7]]


@both_faces
def test_a_bad_word_longer_than_the_rows_memory_does_not_match(face):
    """Not even where the rows before it in the batch hold the word's beginning."""
    sampling = params(bad_words=[[[1, 2, 3, 4]]])
    got = process(face, torch.zeros(3, 5), sampling, rows_of(3, recent=[[1], [2], [3]]))
    assert kept(got) == [[0, 1, 2, 3, 4]] * 3


@both_faces
def test_stop_ids_are_banned_until_min_position(face):
    """The token drawn after a row at position p stands at p + 1."""
    sampling = params(stop_ids=[[2, -1, 0]], min_position=[12])
    got = process(face, torch.zeros(3, 4), sampling, rows_of(3, positions=[10, 11, 12]))
    assert kept(got) == [[1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


@both_faces
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_padded_vocabulary_is_dropped(face, temperature):
    logits = torch.cat([random_logits(2, 7), torch.full((2, 3), 1e9, device=DEVICE)], 1)
    got = process(face, logits, params(temperature=[temperature]), vocab=7)
    assert torch.equal(got, process(face, logits[:, :7].contiguous(), params(temperature=[temperature])))


@both_faces
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_banned_is_minus_infinity_throughout(face, temperature):
    sampling = params(
        bias_ids=[[0, 1]], bias=[[NEVER, NEVER]], temperature=[temperature], top_p=[0.9], top_k=[1], min_p=[0.5]
    )
    assert process(face, [[1.0, 2.0]], sampling).tolist() == [[NEVER, NEVER]]


@both_faces
def test_all_but_one_banned_leaves_that_one_with_certainty(face):
    logits = torch.full((1, 1500), NEVER)
    logits[0, 1300] = -60000.0
    for temperature in (0.0, 1e-3, 1.0):
        got = process(face, logits, params(temperature=[temperature], top_p=[0.1], min_p=[0.9], top_k=[1]))
        assert got[0, 1300] == 0.0
        assert kept(got) == [[1300]]


@both_faces
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.7, 1e4])
@pytest.mark.parametrize("top_k", [1, 50, 700, 4999])
def test_edges_are_found_whichever_blocks_hold_them(face, temperature, top_k):
    """Thousands of tokens, many equal, some banned: every token beyond the k-th value goes, wherever it stands."""
    logits = (random_logits(2, 5000) * 4).round() / 4
    logits[0, 1000:3000] -= 40
    logits[1, ::3] = NEVER
    sampling = params(temperature=[temperature], top_k=[top_k])
    log_probs = process(face, logits, sampling)
    edge = logits.sort(-1, descending=True).values[:, top_k - 1 : top_k]
    assert kept(log_probs) == kept(logits.masked_fill(logits < edge, NEVER))
    torch.testing.assert_close(log_probs, process(reference, logits, sampling))
