"""A differential fuzzer: random Triton kernels, compiled for the CPU and in Triton's interpreter, must agree.

kinds.py     element types, and how finely floats are tracked so that both sides must agree in every bit
program.py   what a generated program is: source text, buffers, arguments, grid
builder.py   the state of a program being written: lines, values in scope, operands
values.py    one line of arithmetic; tiles.py: of shapes, reductions, scans, products
accesses.py  loads, stores, atomics
control.py   loops, branches, whole programs: the strategy `programs()`
bfloat.py    mends bf16 in Triton's interpreter
worker.py    a process that runs programs; pair.py: one of each kind, and the comparison
"""
