"""The drafts that come with lychee are whole, and of the sizes that their cards say."""

import math

import pytest

from lychee.models.model_files import open_model
from lychee.models.names import DRAFTS, resolve_model
from lychee.models.weights import check

TARGET_PARAMETERS = {"smollm2-draft": 106_203_456}  # without the embedding


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_whole_small_and_found_by_its_name(name):
    path = resolve_model(name)
    opened = open_model(path)
    check(opened.source, opened.config)
    assert opened.config.output_vocab
    layers = [entry for key, entry in opened.source.entries.items() if key.startswith("model.layers.")]
    assert sum(math.prod(entry.shape) for entry in layers) <= 0.1 * TARGET_PARAMETERS[name]
    assert sum(file.stat().st_size for file in path.iterdir()) <= 40_000_000
    assert f"{opened.config.output_vocab:,}" in (path / "MODEL_CARD.md").read_text()
