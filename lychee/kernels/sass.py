"""What a compiled kernel's machine code says of it: its main loop, widths of loads, what multiplies matrices."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from tempfile import NamedTemporaryFile
from typing import Any

from triton import knobs

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)([^;]*);")
LABEL = re.compile(r"(\.L_x_\d+):")
LOAD = re.compile(r"(?:LDG|LDGSTS|LD)\.")
WIDTH = re.compile(r"\.(8|16|64|128|256)\b")
NARROW = re.compile(r"\.[US](8|16)\b")
MMA = re.compile(r"(?:H|Q|I|D|HG|QG|IG)MMA\.|UTC\w*MMA")
# Blocks and warps that a multiprocessor holds, bytes of shared memory that it has and those that each block takes
# besides its own; all have 65536 registers (CUDA C++ Programming Guide, "Technical Specifications").
PROCESSORS = {
    80: (32, 64, 167936),
    86: (16, 48, 102400),
    87: (16, 48, 167936),
    89: (24, 48, 102400),
    90: (32, 64, 233472),
    100: (32, 64, 233472),
    120: (24, 48, 102400),
}
REGISTERS, RESERVED_SHARED = 65536, 1024


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order: opcodes, and where each backward branch leads. `loops`: (first, last) each."""

    opcodes: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    @staticmethod
    def of(cubin: bytes) -> Code:
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [knobs.nvidia.nvdisasm.path, "-ndf", "-c", file.name]
            return Code.parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    @staticmethod
    def parse(text: str) -> Code:
        opcodes: list[str] = []
        places: dict[str, int] = {}
        loops: list[tuple[int, int]] = []
        for line in text.splitlines():
            if label := LABEL.match(line):
                places[label[1]] = len(opcodes)
            elif found := INSTRUCTION.search(line):
                target = re.search(r"\.L_x_\d+", found[2])
                if found[1].startswith("BRA") and target and places.get(target[0], len(opcodes)) < len(opcodes):
                    loops.append((places[target[0]], len(opcodes)))
                opcodes.append(found[1])
        return Code(tuple(opcodes), tuple(loops))

    @cached_property
    def main_loop(self) -> tuple[str, ...]:
        """The loop with most matrix instructions, or without any most multiplications; the shortest such. Or all."""
        bodies = [self.opcodes[first : last + 1] for first, last in self.loops]
        for counts in (_matrix, _multiplications):
            if any(map(counts, bodies)):
                return max(bodies, key=lambda body: (counts(body), -len(body)))
        return min(bodies, key=len, default=self.opcodes)

    @property
    def mma(self) -> str:
        """The first instruction that multiplies matrices, or `-`."""
        return next((opcode for opcode in self.opcodes if MMA.match(opcode)), "-")

    @property
    def local_accesses(self) -> int:
        """Loads and stores of what registers had no room for."""
        return sum(opcode.startswith(("LDL", "STL")) for opcode in self.opcodes)

    @property
    def load_bits(self) -> tuple[int, ...]:
        """Widths of the main loop's loads from memory, ascending; of all loads where it has none."""
        loads = [opcode for opcode in self.main_loop if LOAD.match(opcode)]
        return tuple(sorted({_bits(opcode) for opcode in loads or filter(LOAD.match, self.opcodes)}))


def _matrix(body: tuple[str, ...]) -> int:
    return sum(bool(MMA.match(opcode)) for opcode in body)


def _multiplications(body: tuple[str, ...]) -> int:
    return sum(opcode.startswith(("FFMA", "HFMA")) for opcode in body)


def _bits(opcode: str) -> int:
    found = WIDTH.search(opcode) or NARROW.search(opcode)
    return int(found[1]) if found else 32


def occupancy(capability: int, registers: int, shared: int, num_warps: int) -> float:
    """Share of the warps that a multiprocessor can hold, where it holds as many blocks of this kernel as fit."""
    most_blocks, most_warps, all_shared = PROCESSORS[capability]
    per_warp = 256 * ceil(32 * registers / 256)
    blocks = min(
        most_blocks,
        most_warps // num_warps,
        REGISTERS // per_warp // num_warps,
        all_shared // (shared + RESERVED_SHARED),
    )
    return blocks * num_warps / most_warps


DOT = re.compile(
    r"(?:tt\.dot|warp_group_dot)\b.* : .*?<(\d+)x(\d+)x\w+.* \* .*?<(\d+)x(\d+)x\w+.* -> tensor<\d+x\d+xf32, (#\w+)>"
)
LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.nvidia_mma<\{.*warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[([\d, ]+)\]\}>", re.M
)


def instructions_per_weight(code: Code, kernel: Any) -> float | None:
    """Of one thread, in the main loop of a product, for each weight of its tile; None for what is no such product.

    The loop may be unrolled: it is as often as it has more matrix instructions than one step of Triton's code needs.
    """
    constants = {kernel.src.fn.arg_names[at[0]]: value for at, value in kernel.src.constants.items() if len(at) == 1}
    if not {"BLOCK_N", "BLOCK_K"} <= constants.keys():
        return None
    threads: int = 32 * kernel.metadata.num_warps
    needed = _matrix_instructions(kernel.asm["ttgir"])
    found = _matrix(code.main_loop)
    if not needed or not found:  # by multiplications, each thread its share
        rows = constants["BLOCK_M"] * constants.get("ROW_TILES", 1)
        needed = constants["BLOCK_N"] * constants["BLOCK_K"] * rows / threads
        found = _multiplications(code.main_loop)
    steps = max(1, round(found / needed))
    weights: int = constants["BLOCK_N"] * constants["BLOCK_K"] * steps
    return len(code.main_loop) * threads / weights


def _matrix_instructions(ttgir: str) -> int:
    """Those that one warp issues for the dots of a loop's step."""
    layouts = {m[1]: (int(m[2]), int(m[3]), [int(n) for n in m[4].split(",")]) for m in LAYOUT.finditer(ttgir)}
    needed = 0
    for dot in DOT.finditer(ttgir):
        n, k, _, m = map(int, dot.groups()[:4])
        if dot[5] not in layouts:
            return 0
        warps_n, warps_m, shape = layouts[dot[5]]
        if len(shape) == 2:  # of one warp, 16 deep
            each = ceil(n / (shape[0] * warps_n)), ceil(m / (shape[1] * warps_m)), ceil(k / 16)
        else:  # of four warps
            each = ceil(n / (4 * shape[0] * max(1, warps_n // 4))), ceil(m / (shape[1] * warps_m)), ceil(k / shape[2])
        needed += prod(each)
    return needed
