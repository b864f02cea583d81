"""Triton kernels, one operation a module, each with the table of its tile sizes and the cases it is compiled for."""
