"""Horizontal sums of many vectors at once."""

from __future__ import annotations

from dataclasses import dataclass

from .llvm import BYTES, Builder, Val, register


@dataclass(frozen=True)
class _Packed:
    """A register of partial sums; lane i holds a sum of vector `owners[i]` over lanes that begin with `firsts[i]`."""

    ref: str
    owners: tuple[int, ...]
    firsts: tuple[int, ...]


def sum_lanes(b: Builder, elem: str, vectors: list[Val]) -> Val:
    """The sum over each vector's lanes, one lane per vector (and some to spare): neighbours first, halves last.

    Vectors are packed while they shrink; that changes where partial sums stand, not which are added.
    """
    lanes = max(1, vectors[0].lanes)
    if lanes == 1:
        return _pack(b, elem, [v.ref for v in vectors])
    spare = (1 << (len(vectors) - 1).bit_length()) - len(vectors)  # LLVM drops what is computed of them
    vectors = vectors + [Val(elem, "poison", lanes)] * spare
    held = [_Packed(v.ref, (i,) * lanes, tuple(range(lanes))) for i, v in enumerate(vectors)]
    bit = 1
    while bit < lanes:
        step = 2 if len(held) > 1 else 1
        held = [_fold(b, elem, held[i : i + step], bit) for i in range(0, len(held), step)]
        bit *= 2
    if len(held) > 1:
        return _pack_vectors(b, elem, [p.ref for p in held], len(held[0].owners))
    if len(vectors) == 1:
        return b.lane(Val(elem, held[0].ref, 1), 0)
    return Val(elem, held[0].ref, len(vectors))


def _fold(b: Builder, elem: str, sources: list[_Packed], bit: int) -> _Packed:
    """One register (or two) folded into one: sums whose first lanes differ in `bit` alone are added."""
    width = len(sources[0].owners)
    block = 16 // BYTES[elem]  # lanes that shuffles reach without crossing between 128-bit blocks
    places = [(s, i) for s, source in enumerate(sources) for i in range(width) if not source.firsts[i] & bit]
    if bit < block:
        places.sort(key=lambda place: (place[1] // block, place))
    partner = [{(o, f): i for i, (o, f) in enumerate(zip(s.owners, s.firsts, strict=True))} for s in sources]
    other = [partner[s][sources[s].owners[i], sources[s].firsts[i] | bit] for s, i in places]
    sides = [
        b.shuffle(sources[0].ref, sources[-1].ref, elem, width, order)
        for order in (
            [s * width + i for s, i in places],
            [s * width + i for (s, _), i in zip(places, other, strict=True)],
        )
    ]
    kind, add = register(elem, len(places)), "add" if elem == "i32" else "fadd"
    return _Packed(
        b.op(f"{add} {kind} {sides[0]}, {sides[1]}"),
        tuple(sources[s].owners[i] for s, i in places),
        tuple(sources[s].firsts[i] for s, i in places),
    )


def _pack(b: Builder, elem: str, refs: list[str]) -> Val:
    """Scalars as one vector (one scalar stays one)."""
    if len(refs) == 1:
        return Val(elem, refs[0])
    made, kind = "poison", register(elem, len(refs))
    for i, ref in enumerate(refs):
        made = b.op(f"insertelement {kind} {made}, {register(elem)} {ref}, i32 {i}")
    return Val(elem, made, len(refs))


def _pack_vectors(b: Builder, elem: str, refs: list[str], groups: int) -> Val:
    """Short vectors, all of one length, end to end."""
    while len(refs) > 1:
        refs = [b.shuffle(refs[i], refs[i + 1], elem, groups, list(range(2 * groups))) for i in range(0, len(refs), 2)]
        groups *= 2
    return Val(elem, refs[0], groups)
