// The inner product of two Gram matrices, neither of which is ever in memory (psg_fx/ops/gram_products.py).
//
// Squares of 4x4 entries of both are multiplied in registers, along the rows of x and y as these lie in memory; those
// above the diagonal are not computed, and those below count twice.

#include "registers.h"

constexpr int EDGE = 4;
constexpr int64_t BAND = 64;  // rows that a thread takes at a time

// In lane k the sum of values[k]: pairs are added up lane by lane, as one lane holds what another register lacks.
template <int BIT>
static inline Register sums_of(Register* values) {
  for (int i = 0; i < BIT; ++i) values[i] = even<BIT>(values[i], values[i + BIT]) + odd<BIT>(values[i], values[i + BIT]);
  if constexpr (BIT > 1) return sums_of<BIT / 2>(values);
  return values[0];
}

// Of HEIGHT rows of a and all of b the sums over k < size of a[i][k] b[j][k], as many as a register has lanes.
static inline Register products(const float* const* a, const float* const* b, int64_t size) {
  static_assert(HEIGHT * EDGE == LANES, "a register holds them");
  const int64_t whole = size - size % LANES;
  Register sums[LANES] = {};
  for (int64_t k = 0; k < whole; k += LANES) {
    Register right[EDGE];
    for (int j = 0; j < EDGE; ++j) right[j] = read(b[j] + k);
    for (int i = 0; i < HEIGHT; ++i) {
      const Register left = read(a[i] + k);
      for (int j = 0; j < EDGE; ++j) sums[i * EDGE + j] += left * right[j];
    }
  }
  Register found = sums_of<LANES / 2>(sums);
  for (int64_t k = whole; k < size; ++k)
    for (int lane = 0; lane < LANES; ++lane) found[lane] += a[lane / EDGE][k] * b[lane % EDGE][k];
  return found;
}

// The rows of one sample, and of the one after it.
struct Rows {
  const float *start, *zeros;
  int64_t count, size;
  bool last;

  // EDGE of them; beyond the last one come rows of zeros.
  void at(int64_t first, const float** to) const {
    for (int i = 0; i < EDGE; ++i) to[i] = first + i < count ? start + (first + i) * size : zeros;
  }

  // As many of the next sample come closer while this one is computed: rows are too short for the machine to foresee it.
  void fetch_next(int64_t first) const {
    if (last) return;
    const float* from = start + (count + first) * size;
    const float* to = start + (count + least(first + EDGE, count)) * size;
    for (; from < to; from += LINE / sizeof(float)) __builtin_prefetch(from, 0, 2);
  }
};

struct Sums {
  float dots, roots;
};

static Sums band(const Rows& x, const Rows& y, int64_t first) {
  Register on = {}, below = {};
  float roots = 0;
  for (int64_t i = first; i < least(first + BAND, x.count); i += EDGE) {
    x.fetch_next(i), y.fetch_next(i);
    for (int64_t j = 0; j <= i; j += EDGE) {
      const float *left_x[EDGE], *right_x[EDGE], *left_y[EDGE], *right_y[EDGE];
      x.at(i, left_x), x.at(j, right_x), y.at(i, left_y), y.at(j, right_y);
      for (int top = 0; top < EDGE; top += HEIGHT) {
        const Register dots = products(left_x + top, right_x, x.size) * products(left_y + top, right_y, y.size);
        (i == j ? on : below) += dots;
        for (int k = 0; i == j && k < HEIGHT; ++k) roots += __builtin_sqrtf(dots[k * EDGE + top + k]);
      }
    }
  }
  return {sum_of(on) + 2 * sum_of(below), roots};
}

// x[n, t, i], y[n, t, o] -> out[2, n]: the products, and the sums of the roots of those on the diagonals.
extern "C" void gram_dots(
    const float* x, const float* y, float* out, int64_t n, int64_t t, int64_t i, int64_t o, int threads) {
  const Floats zeros(i < o ? o : i);
  const int64_t bands = (t + BAND - 1) / BAND;
  const Floats dots(n * bands), roots(n * bands);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t task = 0; task < n * bands; ++task) {
    const int64_t s = task / bands;
    const Rows of_x = {x + s * t * i, zeros.values, t, i, s + 1 == n};
    const Rows of_y = {y + s * t * o, zeros.values, t, o, s + 1 == n};
    const Sums found = band(of_x, of_y, task % bands * BAND);
    dots.values[task] = found.dots, roots.values[task] = found.roots;
  }
  for (int64_t s = 0; s < n; ++s) {
    out[s] = out[n + s] = 0;
    for (int64_t k = s * bands; k < (s + 1) * bands; ++k) out[s] += dots.values[k], out[n + s] += roots.values[k];
  }
}
