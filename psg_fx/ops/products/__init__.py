"""Products, convolutions and weighted sums by kernels of psg_fx: in C++ on a CPU, in Triton on CUDA."""
