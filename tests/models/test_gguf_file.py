"""GGUF headers: read as the gguf package's reader does, and refused in a sentence where they do not fit the file."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Type

from lychee.models.files import ModelError
from lychee.models.gguf_file import GGUFFile
from tests.factory import make_model_dir
from tests.models.gguf_bytes import array, file_bytes, info, pair, text, u32
from tests.models.gguf_factory import to_gguf


def opened(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    return GGUFFile.open(tmp_path / "m.gguf")


def keys(*pairs):
    return file_bytes(pairs)


def holding(*infos, data):
    return file_bytes(infos=infos, data=data)


ALIGN = "general.alignment"
W = bytes(16)  # the data of info()'s tensor


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "needs 8 bytes|must start with b'GGUF'"),
        (b"GGU", "starts with b'GGU', must start with b'GGUF'"),
        (b"ggjt" + bytes(50), "starts with b'ggjt', must start with b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (file_bytes(version=1), "has GGUF version 1, must be 2 or 3"),
        (file_bytes(version=4), "has GGUF version 4, must be 2 or 3"),
        (file_bytes(version=3 << 24), "is big-endian, must be little-endian"),
        (b"GGUF" + u32(3), "tensor count needs 8 bytes at byte 8, where the header may have 0"),
        (file_bytes(num_pairs=1 << 63), "key count is 9223372036854775808, may be at most 65536"),
        (file_bytes(num_infos=1 << 40), "tensor count is 1099511627776, may be at most 65536"),
        (keys(text(b"k" * 70000)), "key has 70000 bytes, may have at most 65535"),
        (keys(text(b"\xff\xfe") + u32(4) + u32(1)), "key is not UTF-8"),
        (keys(pair("k", 13, b"")), "k has value type 13, which is not a known one"),
        (keys(pair("k", Type.STRING, struct.pack("<Q", 1 << 62))), "k has 4611686018427387904 bytes, may have at most"),
        (keys(pair("k", Type.STRING, text(b"\xff"))), "k is not UTF-8"),
        (keys(pair("k", Type.BOOL, b"\2")), r"k has a byte above 1, must be true \(1\) or false \(0\)"),
        (file_bytes([pair("k", Type.UINT32, u32(1))] * 2), "gives k twice"),
        (keys(array("k", Type.ARRAY, 1, bytes(12))), "k is an array of arrays, must be one of strings"),
        (keys(array("k", Type.UINT8, 1 << 50)), "k needs 1125899906842624 bytes"),
        (keys(array("k", Type.STRING, 1 << 50)), r"element \d of k goes past the end of the header"),
        (keys(array("k", Type.STRING, 2, text("a"))), "element 1 of k goes past the end of the header"),
        (keys(array("k", Type.STRING, 1, struct.pack("<Q", 1 << 40))), "element 0 of k goes past the end"),
        (keys(array("k", Type.STRING, 1, text(b"\xc3"))), "element 0 of k is not UTF-8"),
        (keys(pair(ALIGN, Type.UINT32, u32(24))), "general.alignment is 24, must be a power of two"),
        (keys(pair(ALIGN, Type.UINT32, u32(0))), "general.alignment is 0, must be a power of two"),
        (keys(pair(ALIGN, Type.STRING, text("x"))), "general.alignment is x, must be a power of two"),
        (keys(pair("split.count", Type.UINT16, b"\3\0")), "split.count is 3, must be 1: merge the parts first"),
        (keys(pair("general.type", Type.STRING, text("adapter"))), "general.type is adapter, must be model"),
        (holding(info(name="n" * 65), data=W), "tensor name has 65 bytes, may have at most 64"),
        (holding(info(shape=()), data=bytes(48)), "tensor w has 0 dimensions, may have 1 to 4"),
        (holding(info(shape=(1,) * 5), data=W), "tensor w has 5 dimensions, may have 1 to 4"),
        (holding(text("w") + u32(1 << 31), data=bytes(32)), "tensor w has 2147483648 dimensions"),
        (holding(info(kind=99), data=W), "tensor w has type 99, which is not a known one"),
        (holding(info(kind=4), data=W), "tensor w has type 4, which is not a known one"),  # Q4_2, removed
        (holding(info(shape=(0,)), data=W), r"tensor w has shape \[0\], sizes must be at least 1"),
        (holding(info(shape=(48, 2), kind=8), data=bytes(512)), r"shape \[2, 48\].* its rows a multiple of 32"),
        (holding(info(offset=8), data=bytes(64)), "starts at byte 8 of the data, must start at a"),
        (holding(info(), data=bytes(15)), r"tensor w would end at byte 80 of a file of 79"),
        (holding(info(shape=(1 << 63, 1 << 63)), data=W), "would end at byte 34028236692093846346337460743"),
        (holding(info(offset=1 << 62), data=W), "would end at byte 4611686018427387984"),
        (holding(info(), info(), data=W), "has two tensors w"),
        (holding(info(), info("v"), data=W), "tensors w and v overlap"),
        (holding(info(shape=(16,)), info("v", offset=32), data=bytes(64)), "tensors w and v overlap"),
    ],
)  # fmt: skip
def test_headers_are_checked_against_the_file(tmp_path, content, message):
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            opened(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not exist or is no file"):
        GGUFFile.open(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="does not exist or is no file"):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_all_types_are_read(tmp_path, version):
    scalars = {
        Type.UINT8: ("<B", 200), Type.INT8: ("<b", -3), Type.UINT16: ("<H", 65535), Type.INT16: ("<h", -300),
        Type.UINT32: ("<I", 1 << 31), Type.INT32: ("<i", -5), Type.UINT64: ("<Q", 1 << 63),
        Type.INT64: ("<q", -(1 << 62)), Type.FLOAT32: ("<f", 0.5), Type.FLOAT64: ("<d", 0.1), Type.BOOL: ("<B", True),
    }  # fmt: skip
    pairs = [pair(kind.name, kind, struct.pack(form, value)) for kind, (form, value) in scalars.items()]
    pairs += [array(f"{kind.name}s", kind, 2, struct.pack(form, value) * 2) for kind, (form, value) in scalars.items()]
    pairs += [pair("s", Type.STRING, text("héllo")), array("ss", Type.STRING, 3, text("a") + text("") + text("日本"))]
    pairs += [array("none", Type.STRING, 0), array("no", Type.INT32, 0)]
    file = opened(tmp_path, file_bytes(pairs, version=version))
    for kind, (_, value) in scalars.items():
        assert file.metadata[kind.name] == value
        assert type(file.metadata[kind.name]) is type(value)
        assert file.metadata[f"{kind.name}s"].tolist() == [value, value]
    assert (file.metadata["s"], file.metadata["ss"]) == ("héllo", ["a", "", "日本"])
    assert (file.metadata["none"], file.metadata["no"].tolist()) == ([], [])


@pytest.mark.parametrize("alignment", [32, 8, 256])
def test_tensors_are_where_the_packages_reader_finds_them(tmp_path, alignment):
    model = make_model_dir(tmp_path / "m", layers=1)
    path = to_gguf(tmp_path / "m.gguf", model, metadata={"general.alignment": alignment} if alignment != 32 else {})
    file, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    assert len(file.tensors) == len(theirs.tensors) == 11
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.type, ours.offset, ours.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            got = file.metadata[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents()


def test_a_value_of_another_type_is_refused_by_name(tmp_path):
    file = opened(tmp_path, file_bytes([pair("k", Type.UINT32, u32(5)), pair("b", Type.BOOL, b"\1")]))
    assert file.get("k", int) == 5
    assert file.get("k", float) == 5.0
    assert file.get("none", str) is None
    assert file.get("none", str, "x") == "x"
    with pytest.raises(ModelError, match=r"m\.gguf: k is 5, must be of type str"):
        file.get("k", str)
    with pytest.raises(ModelError, match=r"m\.gguf: b is True, must be of type int"):
        file.get("b", int)
