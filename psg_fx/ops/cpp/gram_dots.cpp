// The inner product of two Gram matrices, neither of which is ever in memory (psg_fx/ops/products/gram_products.py).
//
// Squares of 4x4 entries of both are multiplied in registers, along the rows of x and y as these lie in memory; those
// above the diagonal are not computed, and those below count twice.

#include "registers.h"

constexpr int EDGE = 4;  // columns of a tile, and its rows:
#ifdef __AVX512F__
constexpr int HEIGHT = 4;  // 16 accumulators in 32 registers
#else
constexpr int HEIGHT = 3;  // 12 in 16
#endif
constexpr int PARTS = (HEIGHT * EDGE + LANES - 1) / LANES;  // registers that hold a number for each of its places
constexpr int64_t STEP = LINE / sizeof(float);
constexpr int64_t BAND = 16 * HEIGHT;  // rows that a thread takes at a time

// In lane k the sum of values[k]: pairs are added up lane by lane, as one lane holds what another register lacks.
template <int BIT>
static inline Register sums_of(Register* values) {
  for (int i = 0; i < BIT; ++i) values[i] = even<BIT>(values[i], values[i + BIT]) + odd<BIT>(values[i], values[i + BIT]);
  if constexpr (BIT > 1) return sums_of<BIT / 2>(values);
  return values[0];
}

// A number for each place of a tile, row by row, then zeros.
struct Places {
  Register parts[PARTS];

  float at(int row, int column) const { return parts[(row * EDGE + column) / LANES][(row * EDGE + column) % LANES]; }
};

// Of HEIGHT rows of a and EDGE of b the sums over k < size of a[i][k] b[j][k].
static inline Places products(const float* const* a, const float* const* b, int64_t size) {
  const int64_t whole = size - size % LANES;
  Register sums[PARTS * LANES] = {};
  for (int64_t k = 0; k < whole; k += LANES) {
    Register left[HEIGHT];
    for (int i = 0; i < HEIGHT; ++i) left[i] = read(a[i] + k);
    for (int j = 0; j < EDGE; ++j) {
      const Register right = read(b[j] + k);
      for (int i = 0; i < HEIGHT; ++i) sums[i * EDGE + j] += left[i] * right;
    }
  }
  Places found;
  for (int part = 0; part < PARTS; ++part) found.parts[part] = sums_of<LANES / 2>(sums + part * LANES);
  for (int64_t k = whole; k < size; ++k)
    for (int place = 0; place < HEIGHT * EDGE; ++place)
      found.parts[place / LANES][place % LANES] += a[place / EDGE][k] * b[place % EDGE][k];
  return found;
}

// The rows of one sample, and of the one after it.
struct Rows {
  const float *start, *zeros;
  int64_t count, size, of_row, of_sample;
  bool last;

  // So many of them; beyond the last one come rows of zeros.
  template <int MANY>
  void at(int64_t first, const float** to) const {
    for (int i = 0; i < MANY; ++i) to[i] = first + i < count ? start + (first + i) * of_row : zeros;
  }
};

// Rows of the next sample, which come closer tile by tile while this one is computed: they are too short for the machine
// to foresee them, and too many to be asked for at once.
struct Ahead {
  const float *from, *to;  // of what is left of a row, or of all rows if they follow each other
  int64_t of_row, size, rows, of_tile;

  Ahead(const Rows& of, int64_t first, int64_t end, int64_t tiles)
      : of_row(of.of_row), size(of.size), rows(of.last ? 0 : end - first),
        of_tile(((end - first) * size / tiles / STEP + 1) * STEP) {
    if (of_row == size) size *= rows, rows = rows > 0;
    from = of.start + of.of_sample + first * of.of_row, to = rows > 0 ? from + size : from;
  }

  void fetch() {
    const float* until = to - from < of_tile ? to : from + of_tile;
    for (; from < until; from += STEP) __builtin_prefetch(from, 0, 2);
    if (from >= to && rows > 1) from = to - size + of_row, to = from + size, --rows;
  }
};

// Tiles on the diagonal and below it, of rows first to end.
static int64_t tiles_of(int64_t first, int64_t end) {
  int64_t found = 0;
  for (int64_t i = first; i < end; i += HEIGHT) found += (i + HEIGHT - 1) / EDGE + 1;
  return found;
}

struct Sums {
  double dots, roots;
};

static Sums band(const Rows& x, const Rows& y, int64_t first) {
  double below = 0, on = 0, roots = 0;  // thousands of entries, which may all round the same way
  const int64_t end = least(first + BAND, x.count), tiles = tiles_of(first, end);
  Ahead next_x(x, first, end, tiles), next_y(y, first, end, tiles);
  for (int64_t j = 0; j < end; j += EDGE) {  // these rows are in the nearest cache for all i but the first
    Register column = {};
    const float *right_x[EDGE], *right_y[EDGE];
    x.at<EDGE>(j, right_x), y.at<EDGE>(j, right_y);
    for (int64_t i = first; i < end; i += HEIGHT) {
      if (i + HEIGHT <= j) continue;
      next_x.fetch(), next_y.fetch();
      const float *left_x[HEIGHT], *left_y[HEIGHT];
      x.at<HEIGHT>(i, left_x), y.at<HEIGHT>(i, left_y);
      Places dots = products(left_x, right_x, x.size);
      const Places of_y = products(left_y, right_y, y.size);
      for (int part = 0; part < PARTS; ++part) dots.parts[part] *= of_y.parts[part];
      if (i >= j + EDGE) {
        for (int part = 0; part < PARTS; ++part) column += dots.parts[part];
        continue;
      }
      for (int row = 0; row < HEIGHT; ++row)
        for (int k = 0; k < EDGE; ++k) {
          const float dot = dots.at(row, k);
          if (i + row == j + k) roots += __builtin_sqrtf(dot), on += dot;
          else if (i + row > j + k) on += 2 * dot;
        }
    }
    below += sum_of(column);
  }
  return {on + 2 * below, roots};
}

// x[n, t, i], y[n, t, o] -> out[2, n]: the products, and the sums of the roots of those on the diagonals.  strides: of
// samples and of rows of x, then of y, whose rows lie anywhere.
extern "C" void gram_dots(const float* x, const float* y, float* out, const int64_t* strides, int64_t n, int64_t t,
                          int64_t i, int64_t o, int threads) {
  const Floats zeros(i < o ? o : i);
  const int64_t bands = up(t, BAND);
  const Floats dots(n * bands), roots(n * bands);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t task = 0; task < n * bands; ++task) {
    const int64_t s = task / bands;
    const Rows of_x = {x + s * strides[0], zeros.values, t, i, strides[1], strides[0], s + 1 == n};
    const Rows of_y = {y + s * strides[2], zeros.values, t, o, strides[3], strides[2], s + 1 == n};
    const Sums found = band(of_x, of_y, task % bands * BAND);
    dots.values[task] = float(found.dots), roots.values[task] = float(found.roots);
  }
  for (int64_t s = 0; s < n; ++s) {
    double dot = 0, root = 0;
    for (int64_t k = s * bands; k < (s + 1) * bands; ++k) dot += dots.values[k], root += roots.values[k];
    out[s] = float(dot), out[n + s] = float(root);
  }
}
