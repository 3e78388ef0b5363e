"""Imports point down: nouns <- kernels <- compiler <- models <- runtime <- the command line and the service."""

import ast
from pathlib import Path

import pytest

import lychee

PACKAGE = Path(lychee.__file__).parent
LAYERS = ["nouns", "kernels", "compiler", "models", "runtime"]
TOP = len(LAYERS)
MAY_USE_BACKENDS = ("lychee.backends", "lychee.kernels.kernel")


def imported(source, module, is_package):
    """Absolute dotted names of all that a file imports, at any depth of its code, literal dynamic imports included."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def layer(name):
    """Height of a dotted name of the package; what is in no layer's package is at the top."""
    parts = name.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else TOP


def violations(source, module, is_package=False):
    for name in imported(source, module, is_package):
        root = name.split(".")[0]
        if root in ("tests", "bench"):
            yield f"{module} imports {name}, which is not part of the package"
        elif root != "lychee":
            continue
        elif name.startswith("lychee.backends"):
            if not module.startswith(MAY_USE_BACKENDS):
                yield f"{module} imports {name}: only Triton and the launching of kernels know the backends"
        elif module.startswith("lychee.backends"):
            yield f"{module} imports {name}: the backends know nothing else"
        elif layer(name) > layer(module):
            yield f"{module} imports {name}, a layer above"


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("lychee", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_imports_point_down():
    found = list(modules())
    assert {"lychee", "lychee.kernels", "lychee.kernels.op"} <= {module for _, module, _ in found}
    assert [v for path, module, is_package in found for v in violations(path.read_text(), module, is_package)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lychee.kernels.op", "import lychee.models.llama"),
        ("lychee.kernels.op", "import torch, lychee.runtime as r"),
        ("lychee.kernels.op", "from lychee.compiler import trace"),
        ("lychee.kernels.op", "from lychee import models"),
        ("lychee.kernels.op", "import lychee"),
        ("lychee.kernels.op", "from .. import runtime"),
        ("lychee.kernels.op", "from ..models.config import Config"),
        ("lychee.kernels.op", "def f():\n    from ..run import main"),
        ("lychee.kernels.op", "if TYPE_CHECKING:\n    from lychee.models.llama import Llama"),
        ("lychee.kernels.op", "import importlib\nimportlib.import_module('lychee.runtime.engine')"),
        ("lychee.compiler.trace", "from ..models import llama"),
        ("lychee.models.llama", "from ..runtime.engine import Engine"),
        ("lychee.runtime.engine", "from ..serve.app import app"),
        ("lychee.runtime.engine", "from lychee.run import main"),
        ("lychee.runtime.engine", "from tests.factory import tiny"),
        ("lychee.run", "from bench.ops import main"),
        ("lychee.models.llama", "from lychee.backends import cpu"),
        ("lychee.kernels.op", "from ..backends.cpu.launch import Launch"),
        ("lychee.backends.cpu.compiler", "from lychee.kernels import OPS"),
    ],
)
def test_checker_sees_an_import_that_points_up(module, source):
    assert len(list(violations(source, module))) == 1


def test_checker_resolves_relative_imports_of_a_package_from_itself():
    assert list(violations("from .op import OPS", "lychee.kernels", is_package=True)) == []
    assert list(violations("from ..models import llama", "lychee.kernels", is_package=True)) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lychee.kernels.op", "from .types import Spec\nfrom . import types\nimport torch"),
        ("lychee.compiler.trace", "from ..kernels import OPS"),
        ("lychee.models.llama", "from lychee.kernels import linear\nfrom ..compiler.trace import trace"),
        ("lychee.runtime.engine", "from ..models.llama import Llama\nfrom .blocks import BlockPool"),
        ("lychee.run", "from lychee.runtime.llm import LLM\nfrom . import __version__\nimport lychee.serve"),
        ("lychee.backends.cpu.compiler", "from .driver import Driver\nfrom triton.backends.compiler import GPUTarget"),
        ("lychee.kernels.kernel", "from ..backends.cpu.launch import Launch"),
    ],
)
def test_checker_allows_imports_that_point_down(module, source):
    assert list(violations(source, module)) == []
