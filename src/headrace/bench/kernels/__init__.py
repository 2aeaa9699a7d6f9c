"""Benchmarks of single kernels: time beside the floor and beside the library's own."""
