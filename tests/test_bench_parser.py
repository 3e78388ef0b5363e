"""A bench says what is wrong with its options in one line, with exit code 2."""

from importlib import import_module

import pytest

BENCHES = (
    "acceptance", "cpu_kernels", "cpu_pair", "dialled", "equals_transformers", "gpu_checks", "gpu_session",
    "long_prompt", "ops", "peers", "prefix", "quality", "rows", "serve_load", "simulator", "throughput", "train_draft",
    "trees", "triton_versions",
)  # fmt: skip


@pytest.mark.parametrize("name", BENCHES)
def test_an_option_that_there_is_not_is_one_line(name, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(f"bench.{name}").main(["--nonsense"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert not err.startswith("usage")
