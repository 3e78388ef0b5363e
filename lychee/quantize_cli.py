"""`lychee quantize`: write a model again with int8 or int4 weights, and say what each kind of tensor lost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .models.model_files import gguf_path
from .models.names import resolve_model
from .models.quant_format import QuantFormat, format_of
from .models.save_quantized import Written, save_quantized
from .options import Parser, exit_code
from .runtime.checks import ParameterError

FORMATS = """formats:
  int8          one scale a row: half the size of 16-bit floats
  int8-g32      a scale for every 32 weights of a row
  int4          int4-g32-min: 5 bits a weight, the smallest error that int4 has
  int4-gN-KIND  N is 32, 64 or 128 weights that share a scale; KIND says what they share besides:
                  min   a minimum (what int4-gN without a KIND is)
                  zero  a whole number that stands for 0
                  sym   nothing: the smallest files

The format is that of the layers' projections. The head and an embedding tied to it are int8 whatever the format is;
another embedding, norms and biases stay as they are. The error is |quantised - original| / |original|.
"""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="lychee quantize",
        description="Write a model again with int8 or int4 weights. `lychee run OUT` runs what it writes.",
        epilog=FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "model", metavar="MODEL", help="a directory of safetensors, or the name of a model as for `lychee get`"
    )
    p.add_argument("out", type=Path, metavar="OUT", help="the directory to write, which is absent or empty")
    p.add_argument("--format", required=True, metavar="FORMAT", help="int8, int4, or one of those below")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("lychee quantize", lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    try:
        fmt = QuantFormat.parse(args.format)
    except ValueError as error:
        raise ParameterError(f"--format: {error}") from error
    model = resolve_model(args.model)
    if file := gguf_path(model):
        raise ParameterError(f"MODEL is {args.model}, of the GGUF file {file.name}; must be safetensors of floats")
    if not model.is_dir():
        raise ParameterError(f"MODEL is {args.model}, must be a directory, or a name that `lychee get` knows")
    total = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with tqdm(total=total, desc="quantising", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        written = save_quantized(model, args.out, fmt, on_written=lambda w: bar.update(w.bytes_before))
    Console().print(table(written, fmt))
    return 0


def table(written: Sequence[Written], fmt: QuantFormat) -> Table:
    """A row for each kind of tensor: mean relative error, and sizes before and after."""
    made = Table(box=None, pad_edge=False)
    for header in ("tensors", "", "format", "mean error", "before", "after"):
        made.add_column(header, justify="left" if header in ("tensors", "format") else "right")
    for kind, members in _by_kind(written):
        errors = [w.error for w in members if w.error is not None]
        # An embedding that was quantised was tied.
        own = format_of(members[0].name, fmt, tied=True) if errors else None
        mean = f"{sum(errors) / len(errors):.3%}" if errors else "-"
        made.add_row(kind, str(len(members)), own.name if own else "kept", mean, *_sizes(members))
    made.add_row("all", str(len(written)), "", "", *_sizes(written))
    return made


def _by_kind(written: Sequence[Written]) -> Iterator[tuple[str, list[Written]]]:
    """Projections by their place in a layer, then the head and the embedding, then all that was kept."""
    kinds: dict[str, list[Written]] = {}
    for w in sorted(written, key=lambda w: w.error is None):
        kinds.setdefault("others" if w.error is None else w.name.split(".")[-2], []).append(w)
    yield from kinds.items()


def _sizes(written: Sequence[Written]) -> tuple[str, str]:
    before, after = (sum(getattr(w, f"bytes_{when}") for w in written) for when in ("before", "after"))
    return f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB"
