"""The file that `lychee tune` writes, and what it sets for `lychee run` and `lychee serve`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from . import demo
from .models.files import ModelError, parse_json, read_text
from .models.fingerprint import fingerprint
from .models.names import resolve_model
from .runtime.checks import ParameterError, check_names
from .runtime.config import SpeculativeConfig

FORMAT, VERSION, MOST_BYTES = "lychee tune", 1, 1 << 22
LOADING = ("device", "dtype", "target_quant", "draft_quant", "kv_cache_dtype", "max_model_len", "num_blocks")
DRAFTED = ("max_draft_len", "num_speculative_tokens", "tree", "node_budget")
"""What a round drafts: one given on the command line takes the place of all, but for whether chains are drafted."""
LIMITS, KINDS = {"max_draft_len", "node_budget"}, ("chain", "auto")
SPECULATION = ("draft_model", "draft_quant", *DRAFTED, "verify", "speculative_config")


@dataclass(frozen=True)
class Model:
    """name: as `run` takes it; None is the packaged pair's. digest: its fingerprint."""

    name: str | None
    digest: str

    @classmethod
    def of(cls, name: str | None, packaged: Path) -> Model:
        """A path becomes absolute. Raises ModelError or OSError."""
        path = packaged if name is None else resolve_model(name)
        return cls(str(path.resolve()) if name is not None and Path(name).exists() else name, fingerprint(path))

    def check(self, name: str | None, packaged: Path, file: Path, what: str) -> None:
        """Raises ParameterError where another model has the name than the file was made for."""
        path = packaged if name is None else resolve_model(name)
        if not path.exists() or fingerprint(path) != self.digest:
            shown = what if name is None else name
            raise ParameterError(
                f"--tuned {file} was made for another {what} than {shown}: run `lychee tune` on this one"
            )


@dataclass(frozen=True)
class Tuned:
    """draft None: decode natively. options: of loading, as they were given. batch_size: requests that ran together."""

    model: Model
    draft: Model | None
    speculative_config: Mapping[str, Any]
    options: Mapping[str, Any]
    batch_size: int

    def as_json(self, found: Mapping[str, Any]) -> str:
        """The file's text. found: what is kept beside, for people and other programs; nothing here reads it."""
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps({**head, **asdict(self), "found": found}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> Tuned:
        """Raises ModelError or ParameterError in a sentence that names the file."""
        given = parse_json(read_text(file, MOST_BYTES), f"--tuned {file}")
        if given.pop("format", None) != FORMAT:
            raise ModelError(f"--tuned {file} was not written by `lychee tune`")
        if (version := given.pop("version", None)) != VERSION:
            raise ModelError(f"--tuned {file} has version {version!r}, must be {VERSION}: run `lychee tune` again")
        given.pop("found", None)
        if given.keys() != {field.name for field in fields(cls)}:
            raise ModelError(
                f"--tuned {file} has {', '.join(given)}, must have {', '.join(f.name for f in fields(cls))}"
            )
        try:
            return cls._of(given)
        except (TypeError, ParameterError) as error:
            raise ModelError(f"--tuned {file} is damaged: {error}") from error

    @classmethod
    def _of(cls, given: dict[str, Any]) -> Tuned:
        batch_size = given["batch_size"]
        if type(batch_size) is not int or batch_size < 1:
            raise TypeError(f"batch_size is {batch_size!r}, must be an integer of at least 1")
        for name in ("options", "speculative_config"):
            if not isinstance(given[name], dict):
                raise TypeError(f"{name} is {given[name]!r}, must be an object")
        check_names("options", given["options"], LOADING)
        for name, value in given["options"].items():
            whole = name in ("max_model_len", "num_blocks")
            if type(value) is not (int if whole else str):
                raise TypeError(f"{name} is {value!r}, must be {'an integer' if whole else 'a string'}")
        check_names("speculative_config", given["speculative_config"], (*DRAFTED, "verify"))
        SpeculativeConfig.parse(given["speculative_config"])
        draft = None if given["draft"] is None else _model("draft", given["draft"])
        config, options = given["speculative_config"], given["options"]
        return cls(_model("model", given["model"]), draft, config, options, batch_size)

    def defaults(self, given: argparse.Namespace, file: Path) -> dict[str, Any]:
        """Of the options, those that the file sets: all that are not given, as far as the command has them.

        Raises ParameterError where the model, or the draft that the file names, is another one.
        """
        self.model.check(given.model or self.model.name, demo.TARGET, file, "model")
        found = {**self.options, "model": self.model.name}
        if any(getattr(given, name, None) for name in ("prompt_file", "compare")):
            found["batch_size"] = self.batch_size
        asked = [name for name in SPECULATION if getattr(given, name) is not None]
        if getattr(given, "native", False) or (self.draft is None and not asked):
            if getattr(given, "compare", False) and self.draft is None:
                raise ParameterError(f"--compare has no use with --tuned {file}: it says to decode natively")
            found.pop("draft_quant", None)
            found["native"] = True
        elif self.draft is not None:
            found |= self._speculation(given, file)
        return {name: value for name, value in found.items() if name == "native" or hasattr(given, name)}

    def _speculation(self, given: argparse.Namespace, file: Path) -> dict[str, Any]:
        assert self.draft is not None
        found: dict[str, Any] = {}
        if given.draft_model is None:
            self.draft.check(self.draft.name, demo.DRAFT, file, "draft")
            found["draft_model"] = self.draft.name or str(demo.DRAFT)
        flags = {name for name in (*DRAFTED, "verify") if getattr(given, name) is not None}
        named = flags | _keys(given.speculative_config)
        dropped = {*DRAFTED, "adaptive", "adaptive_max_draft_len", "acceptance_threshold"} & named
        for name, value in self.speculative_config.items():
            if name not in named and not (dropped and name in DRAFTED):
                found[name] = value
        if dropped and dropped <= LIMITS and (tree := SpeculativeConfig.parse(self.speculative_config).tree) in KINDS:
            found["tree"] = tree  # a limit is one of what the file says
        return found


def _model(what: str, given: Any) -> Model:
    if not isinstance(given, dict) or given.keys() != {"name", "digest"} or not isinstance(given["digest"], str):
        raise TypeError(f"{what} is {given!r}, must be an object of name and digest")
    if given["name"] is not None and not isinstance(given["name"], str):
        raise TypeError(f"{what} has the name {given['name']!r}, must be a string or null")
    return Model(given["name"], given["digest"])


def _keys(text: str | None) -> set[str]:
    """Of the option --speculative-config; what is no object is refused where it is used."""
    try:
        given = json.loads(text or "{}")
    except json.JSONDecodeError:
        return set()
    return set(given) if isinstance(given, dict) else set()


def add_tuned(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="what `lychee tune` wrote: its model, draft, drafts' lengths and quantisation; options given here win",
    )
    p.set_defaults(native=False)


def parsed(p: argparse.ArgumentParser, argv: Any) -> argparse.Namespace:
    """Arguments in which --tuned has set what is not given. Raises ParameterError or ModelError."""
    args = p.parse_args(argv)
    if args.tuned is None:
        return args
    p.set_defaults(**Tuned.read(args.tuned).defaults(args, args.tuned))
    return p.parse_args(argv)
