"""CPU kernels written in LLVM's intermediate representation and compiled for the processor at hand.

`builder` writes loops and vectors, `linear`, `attention`, `extend` and `pointwise` are the kernels, `compiler` turns
them into functions that all of torch's OpenMP threads run at once.
"""
