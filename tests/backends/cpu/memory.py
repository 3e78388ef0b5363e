"""Tensors whose neighbours are inaccessible pages, so that an access behind a false mask is a fault and not a guess."""

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
CANARY = 0xA5
_PROT_NONE = 0


@dataclass(frozen=True)
class Guarded:
    """`tensor` ends exactly where an inaccessible page begins (or begins where one ends); `padding` fills its pages."""

    tensor: Tensor
    padding: Tensor

    def intact(self) -> bool:
        """Whether nothing was written beside the tensor on its own pages."""
        return bool((self.padding == CANARY).all())


def guarded(values: Tensor, *, at_start: bool = False) -> Guarded:
    """A contiguous copy of `values` in a mapping of its own, flush with the inaccessible page after (before) it."""
    size = values.numel() * values.element_size()
    pages = max(1, -(-size // PAGE))
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (address, address + (pages + 1) * PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    room = torch.frombuffer(region, dtype=torch.uint8, offset=PAGE, count=pages * PAGE)
    room.fill_(CANARY)
    start = 0 if at_start else pages * PAGE - size
    tensor = room[start : start + size].view(values.dtype).view(values.shape)
    tensor.copy_(values)
    return Guarded(tensor, room[size:] if at_start else room[:start])


def guard(*values: Tensor) -> tuple[Tensor, ...]:
    """The tensors of `guarded`, for tests that only need the fault."""
    return tuple(guarded(v).tensor for v in values)
