// The loops over time of psg_fx/ops/recurrent/layers.py in float32, without a projection, but for what a cell does.
//
// A step is one parallel loop over tiles: some rows (samples) by some units, whose products are in registers when what
// is elementwise is done to them.  A thread has the same units in every step, so its part of the weights stays in its
// cache: the weights are packed once into panels, which hold what a tile reads one after the other.
//
// Each kind of layer is a library of its own (lstm.cpp, gru.cpp, rnn.cpp): a first call waits for what is compiled.

#include "registers.h"

#ifdef __AVX512F__
constexpr int HEIGHT = 4;  // rows of a tile of four vectors: 16 accumulators in 32 registers
#else
constexpr int HEIGHT = 2;  // 8 in 16
#endif

// The first `count` lanes from memory, and zeros.
static inline Register read(const float* from, int64_t count) {
  if (count >= LANES) return *reinterpret_cast<const Unaligned*>(from);
  Register value = {};
  for (int64_t k = 0; k < count; ++k) value[k] = from[k];
  return value;
}

static inline void write(float* to, Register value, int64_t count) {
  if (count >= LANES) {
    *reinterpret_cast<Unaligned*>(to) = value;
  } else {
    for (int64_t k = 0; k < count; ++k) to[k] = value[k];
  }
}

static inline Register all(float value) { return value - Register{}; }

static inline Register bounded(Register x, float by) { return x > by ? all(by) : (x < -by ? all(-by) : x); }

// e^x - 1 = 2^n (e^r - 1) + 2^n - 1 with x = n log 2 + r, |r| <= log(2) / 2: Taylor's series to r^8, which is 2e-9 off.
static inline Register growth(Register x) {
  constexpr float LOG2_HIGH = 0.693359375f, LOG2_LOW = -2.12194440e-4f;  // n times the first one is exact
  constexpr float ROUNDS = 12582912;  // 1.5 * 2^23: a sum with it has no fraction
  constexpr float INVERSE[] = {1, 1 / 2.f, 1 / 6.f, 1 / 24.f, 1 / 120.f, 1 / 720.f, 1 / 5040.f};
  constexpr float LARGEST = 88, LOG2_OF_E = 1.44269504f;
  const Register within = bounded(x, LARGEST), n = in_register(within * LOG2_OF_E + ROUNDS) - ROUNDS;
  const Register r = (within - n * LOG2_HIGH) - n * LOG2_LOW;
  Register series = all(1 / 40320.f);
  for (int k = 6; k >= 0; --k) series = series * r + INVERSE[k];
  const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
  Register power;
  std::memcpy(&power, &bits, sizeof power);
  const Register found = power * (series * r) + (power - 1);
  return x > LARGEST ? all(__builtin_inff()) : found;
}

static inline Register sigmoid(Register x) { return 1 / (2 + growth(-x)); }

static inline Register tangent(Register x) {
  const Register twice = bounded(x, 10);  // where it is 1 to the last bit, and e^2x far from infinite
  const Register grown = growth(twice + twice);
  return grown / (grown + 2);
}

// sums[i][j] += Σ_k a[i][k] panel[k][j], vectors of LANES units; a sum of sums rounds less than one long sum.
constexpr int64_t STRETCH = 128;

template <int ROWS, int WIDTH>
static inline void products(
    const float* a, int64_t stride, const float* panel, int64_t depth, Register (&sums)[ROWS][WIDTH]) {
  for (int64_t from = 0; from < depth; from += STRETCH) {
    Register part[ROWS][WIDTH] = {};
    for (int64_t k = from; k < least(from + STRETCH, depth); ++k, panel += WIDTH * LANES) {
      Register right[WIDTH];
      for (int j = 0; j < WIDTH; ++j) right[j] = read(panel + j * LANES);
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < WIDTH; ++j) part[i][j] += a[i * stride + k] * right[j];
    }
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < WIDTH; ++j) sums[i][j] += part[i][j];
  }
}

struct Sizes {
  int64_t steps, rows, units, gates;
};

// A matrix, of which element (unit, k) is weights[unit * across + k * along], in panels of `width` vectors: units that
// follow each other, or the same units of as many such matrices, which follow each other.
struct Panels {
  int64_t depth;
  int width;
  bool side_by_side;
  int64_t blocks;
  Floats floats;

  Panels(const float* weights, int64_t units, int64_t depth, int width, bool side_by_side, int64_t across,
      int64_t along, int threads)
      : depth(depth), width(width), side_by_side(side_by_side), blocks((units + covered() - 1) / covered()),
        floats(blocks * depth * width * LANES) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < blocks * width; ++at) {
      const int64_t block = at / width, j = at % width;
      const int64_t first = block * covered() + (side_by_side ? 0 : j * LANES);
      const float* from = weights + (side_by_side ? j * units * across : 0) + first * across;
      float* to = &floats.values[block * depth * width * LANES + j * LANES];
      const int64_t count = least(LANES, units - first);
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t unit = 0; unit < count; ++unit) to[k * width * LANES + unit] = from[unit * across + k * along];
    }
  }

  int64_t covered() const { return side_by_side ? LANES : LANES * width; }

  const float* at(int64_t unit) const { return &floats.values[unit / covered() * depth * width * LANES]; }
};

// All tiles of a step; each thread of those around it comes here.
template <class Cell>
static void step_of(const Cell& cell, int64_t step) {
  const int64_t whole = cell.sizes.rows / HEIGHT, tiles = whole + cell.sizes.rows % HEIGHT;
  const int64_t wide = cell.panels.covered(), blocks = (cell.sizes.units + wide - 1) / wide;
#pragma omp for schedule(static) collapse(2)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t n = 0; n < tiles; ++n)
      if (n < whole)
        cell.template tile<HEIGHT>(step, n * HEIGHT, block * wide);
      else
        cell.template tile<1>(step, whole * HEIGHT + n - whole, block * wide);
}

template <class Cell>
static void forwards(const Cell& cell, int threads) {
#pragma omp parallel num_threads(threads)
  for (int64_t step = 0; step < cell.sizes.steps; ++step) step_of(cell, step);
}

// States as they were before a step.
static inline const float* before(const float* first, const float* states, const Sizes& s, int64_t step, int64_t row) {
  return step ? states + ((step - 1) * s.rows + row) * s.units : first + row * s.units;
}

// What goes from a step to the one before: every_{t-1} = dh_{t-1} + W^T da_t + every_t kept_t, if anything is kept, a
// gate.  Of `every` so many steps are in memory, all or two.
struct Backward {
  static constexpr int WIDTH = 4;
  const float *dh, *kept;
  float *da, *every, *first;
  int64_t held;
  Sizes sizes;
  const Panels& panels;

  float* of(int64_t step) const { return every + step % held * sizes.rows * sizes.units; }

  template <int ROWS>
  void tile(int64_t step, int64_t row, int64_t from) const {
    const int64_t size = sizes.units, at = (step * sizes.rows + row) * size, ago = at - sizes.rows * size;
    const float* now = of(step) + row * size;
    float* then = (step ? of(step - 1) : first) + row * size;
    Register sums[ROWS][WIDTH] = {};
    products(da + sizes.gates * at, sizes.gates * size, panels.at(from), sizes.gates * size, sums);
    for (int j = 0; j < WIDTH && from + j * LANES < size; ++j) {
      const int64_t unit = from + j * LANES, count = least(LANES, size - unit);
      for (int i = 0; i < ROWS; ++i) {
        const int64_t in_row = i * size + unit;
        Register sum = sums[i][j];
        if (kept) sum += read(now + in_row, count) * read(kept + sizes.gates * (at + i * size) + unit, count);
        if (step) sum += read(dh + ago + in_row, count);
        write(then + in_row, sum, count);
      }
    }
  }
};

// of_row(dh, first element, unit, count): da of these units
template <class Row>
static void backwards(const Backward& cell, const Row& of_row, int threads) {
  const Sizes& s = cell.sizes;
  const int64_t last = (s.steps - 1) * s.rows * s.units;
  std::memcpy(cell.of(s.steps - 1), cell.dh + last, s.rows * s.units * sizeof(float));
#pragma omp parallel num_threads(threads)
  for (int64_t step = s.steps; step-- > 0;) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s.rows; ++row)
      for (int64_t unit = 0; unit < s.units; unit += LANES) {
        const int64_t count = least(LANES, s.units - unit);
        of_row(read(cell.of(step) + row * s.units + unit, count), step, row, unit, count);
      }
    step_of(cell, step);
  }
}

static Panels of_backward(const float* w, const Sizes& s, int threads) {
  return Panels(w, s.units, s.gates * s.units, Backward::WIDTH, false, 1, s.units, threads);
}
