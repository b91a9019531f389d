"""Recurrent layers as ops, and who computes them: torch, C++ on a CPU, Triton on CUDA."""
