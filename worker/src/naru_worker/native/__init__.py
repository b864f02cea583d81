"""The CPU backend's C++ kernels and what compiles them. Loaded through `naru_worker.adapters.ops.native_lib`."""
