"""Horizontal sums of many vectors at once."""

from __future__ import annotations

from .llvm import Builder, Val, register


def sum_lanes(b: Builder, elem: str, vectors: list[Val]) -> Val:
    """The sum over each vector's lanes, one lane per vector: halves added until one lane is left.

    Vectors are packed while they shrink; that changes where partial sums stand, not which are added.
    """
    count, lanes = len(vectors), max(1, vectors[0].lanes)
    refs, groups, length = [v.ref for v in vectors], 1, lanes  # every ref holds `groups` runs of `length` partial sums
    add = "add" if elem == "i32" else "fadd"
    if lanes == 1:
        return _pack(b, elem, refs)
    while length > 1:
        half = length // 2
        pair = len(refs) > 1
        merged = []
        for i in range(0, len(refs), 2 if pair else 1):
            width_now = groups * length
            starts = [g * length for g in range(groups)]
            if pair:
                starts += [width_now + s for s in starts]
            sides = [
                b.shuffle(
                    refs[i],
                    refs[i + 1] if pair else refs[i],
                    elem,
                    width_now,
                    [s + o + t for s in starts for t in range(half)],
                )
                for o in (0, half)
            ]
            kind = register(elem, len(starts) * half)
            merged.append(b.op(f"{add} {kind} {sides[0]}, {sides[1]}"))
        groups *= 2 if pair else 1
        refs, length = merged, half
    if len(refs) > 1:
        return _pack_vectors(b, elem, refs, groups)
    if count == 1:
        return b.lane(Val(elem, refs[0], 1), 0)
    return Val(elem, refs[0], count)


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
