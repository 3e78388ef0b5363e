"""A draft is trained for a tiny target from prompts to model card, and each stage goes on from its files."""

import contextlib
import io
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from bench import train_draft
from bench.draft import data, files, train
from bench.draft.attention import attend
from bench.draft.decoder import Decoder
from bench.draft.net import Draft
from bench.draft.target import load_target
from tests.factory import make_model_dir


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "target"
    return make_model_dir(folder, layers=3, seed=3)


@pytest.fixture(scope="module")
def command(target, tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    (texts / "m.py").write_text("def f(x):\n    return x + 1\n\n\n" * 30)
    sizes = ["--prompts", "40", "--rows", "8", "--positions", "64", "--answer", "12", "--output-vocab", "300"]
    paths = ["--target", str(target), "--out", str(texts / "out"), "--texts", str(texts)]
    return [
        *paths,
        *sizes,
        "--device",
        "cpu",
        "--save-every",
        "10",
        "--steps",
        "30",
        "--batch",
        "2",
        "--layers",
        "0,2",
    ], texts / "out"


@pytest.fixture(scope="module")
def printed(command):
    """What the command prints when it has trained and written the draft."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train_draft.main(command[0])
    return out.getvalue()


def test_the_loss_falls_and_the_directory_is_complete(command, printed, target):
    out = command[1]
    losses = [float(n) for n in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.9 * losses[0]
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["num_hidden_layers"] == 2
    ids = weights["output_ids"]
    assert config["lychee_draft"] == {"shares_embedding": True, "output_vocab": len(ids)}
    assert ids.dtype == torch.int64
    assert (ids.diff() > 0).all()
    model = load_target(target, 8)
    size = model.shape.vocab_size
    assert torch.equal(weights["embed_probe"], model.embedding[[i * size // 16 for i in range(16)]].half())
    others = {n: w for n, w in weights.items() if n not in ("output_ids", "embed_probe")}
    assert set(others) == {n for n in model.state_dict() if "embed" not in n and ".2." not in n}
    assert {w.dtype for w in others.values()} == {torch.bfloat16}
    assert "| chat |" in (out / "MODEL_CARD.md").read_text()


def test_a_finished_run_is_not_trained_again(command, printed, capsys):
    flags, _ = command
    train_draft.main(flags)
    assert "loss" not in capsys.readouterr().out


def test_training_may_begin_with_a_finished_draft(command, printed, tmp_path):
    flags, out = command
    again = tmp_path / "again"
    moved = [str(again) if flag == str(out) else flag for flag in flags]
    shutil.copytree(out.with_name("out.work") / "text", tmp_path / "again.work" / "text")
    steps = moved.index("--steps") + 1
    train_draft.main([*moved[:steps], "1", *moved[steps + 1 :], "--stages", "train", "--start", str(out)])
    before, after = (load_file(folder / "model.safetensors") for folder in (out, again))
    assert torch.equal(before["output_ids"], after["output_ids"])
    for name, weight in before.items():
        if name.endswith("_proj.weight"):
            assert not torch.equal(weight, after[name]), name
            torch.testing.assert_close(after[name], weight, atol=0.1, rtol=0.1)


def test_another_target_is_refused(command, printed, tmp_path):
    other = make_model_dir(tmp_path / "other", layers=3, seed=4)
    with pytest.raises(ValueError, match="not trained for this target"):
        files.load(command[1], load_target(other, 8))


def test_a_draft_with_all_layers_and_outputs_is_the_target(target):
    model = load_target(target, 32)
    draft = Draft(model, [0, 1, 2], torch.arange(model.shape.vocab_size))
    ids = torch.randint(0, model.shape.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draft(ids), model(ids))
    packed = draft(torch.cat([ids[:1], ids[1:]], 1), torch.arange(2).repeat_interleave(20)[None])
    torch.testing.assert_close(packed.view(2, 20, -1), model(ids), atol=1e-4, rtol=1e-4)


def test_the_decoder_says_what_the_model_says(target):
    model, ids = load_target(target, 64), torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = load_target(target, 64)(ids).log_softmax(-1)
    decoder = Decoder(model, 3, 64)
    decoder.prefill([2, 0], [ids[0, :8].tolist(), ids[1, :4].tolist()])
    best, logs = decoder.step(torch.stack([ids[1, 4], ids[0, 0], ids[0, 8]]), torch.tensor([4, 0, 8]))
    for row, place in ((2, wanted[0, 8]), (0, wanted[1, 4])):
        torch.testing.assert_close(logs[row], place[best[row]], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("share", [1, 2, 3])
def test_attention_over_rows_of_differing_lengths(share):
    q = torch.randn(3, 2, share, 64)
    keys, values = torch.randn(2, 3, 2, 70, 64).bfloat16()
    at = torch.tensor([0, 41, 69])
    found = attend(q, keys, values, at)
    for row, last in enumerate(at.tolist()):
        k, v = (x[row, :, : last + 1].float() for x in (keys, values))
        wanted = torch.nn.functional.scaled_dot_product_attention(q[row], k, v)
        torch.testing.assert_close(found[row], wanted, atol=2e-3, rtol=2e-3)


def test_texts_are_packed_whole(command, printed):
    texts = data.read(data.shards(command[1].with_name("out.work") / "text"))
    ids = data.choose_outputs(texts, 512, 300, [2])
    rows = data.pack(texts, ids, 512, 64, train_draft.np.random.default_rng(0))
    assert sum(int((row["texts"] >= 0).sum()) for row in rows) == sum(len(t.ids) for t in texts)
    assert sum(int(row["weight"].sum()) for row in rows) == sum(int(t.own.sum()) for t in texts)


def test_gradients_of_a_few_rows_at_a_time_are_those_of_the_whole_batch(command, printed, target, monkeypatch):
    draft = files.load(command[1], load_target(target, 64)).train()
    texts = data.read(data.shards(command[1].with_name("out.work") / "text"))
    rows = data.pack(texts, draft.output_ids.numpy(), 512, 64, train_draft.np.random.default_rng(0))[:5]
    found = []
    for together in (5, 2):
        monkeypatch.setattr(train, "TOGETHER", together)
        loss = train.gradients(draft, train.collate(rows), 0.8, "cpu")
        found.append((loss, [p.grad.clone() for p in draft.parameters() if p.grad is not None]))
        draft.zero_grad()
    (whole, wanted), (parts, got) = found
    assert parts == pytest.approx(whole, rel=1e-3)
    for mine, theirs in zip(got, wanted, strict=True):
        assert float((mine - theirs).norm()) < 0.02 * float(theirs.norm())
