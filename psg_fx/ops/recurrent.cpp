// The loops over time of psg_fx/ops/recurrent.py in float32, without a projection.
//
// A step is one parallel loop over tiles: some rows (samples) by some units, whose products are in registers when what
// is elementwise is done to them.  A thread has the same units in every step, so its part of the weights stays in its
// cache: the weights are packed once into panels, which hold what a tile reads one after the other.

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

// --- forward ---------------------------------------------------------------------------------------------------------

// States as they were before a step.
static inline const float* before(const float* first, const float* states, const Sizes& s, int64_t step, int64_t row) {
  return step ? states + ((step - 1) * s.rows + row) * s.units : first + row * s.units;
}

struct Lstm {
  static constexpr int WIDTH = 4;
  const float *x, *h, *c, *bias;
  float *hidden, *gates, *cells, *squashed;
  Sizes sizes;
  const Panels& panels;

  template <int ROWS>
  void tile(int64_t step, int64_t row, int64_t unit) const {
    const int64_t size = sizes.units, at = (step * sizes.rows + row) * size, count = least(LANES, size - unit);
    const float* cell_before = before(c, cells, sizes, step, row) + unit;
    Register sums[ROWS][WIDTH];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < WIDTH; ++j) {
        sums[i][j] = read(x + WIDTH * (at + i * size) + j * size + unit, count);
        if (bias) sums[i][j] += read(bias + j * size + unit, count);
      }
    products(before(h, hidden, sizes, step, row), size, panels.at(unit), size, sums);
    for (int i = 0; i < ROWS; ++i) {
      const int64_t to = at + i * size + unit;
      const Register now[WIDTH] = {sigmoid(sums[i][0]), sigmoid(sums[i][1]), tangent(sums[i][2]), sigmoid(sums[i][3])};
      const Register cell = now[1] * read(cell_before + i * size, count) + now[0] * now[2], tanh = tangent(cell);
      for (int j = 0; j < WIDTH; ++j) write(gates + WIDTH * (at + i * size) + j * size + unit, now[j], count);
      write(cells + to, cell, count), write(squashed + to, tanh, count), write(hidden + to, now[3] * tanh, count);
    }
  }
};

struct Gru {
  static constexpr int WIDTH = 3;
  const float *x, *h, *bias;
  float *hidden, *gates, *inner;
  Sizes sizes;
  const Panels& panels;

  template <int ROWS>
  void tile(int64_t step, int64_t row, int64_t unit) const {
    const int64_t size = sizes.units, at = (step * sizes.rows + row) * size, count = least(LANES, size - unit);
    const float* state = before(h, hidden, sizes, step, row);
    Register sums[ROWS][WIDTH] = {};
    for (int i = 0; i < ROWS && bias; ++i)
      for (int j = 0; j < WIDTH; ++j) sums[i][j] = read(bias + j * size + unit, count);
    products(state, size, panels.at(unit), size, sums);
    for (int i = 0; i < ROWS; ++i) {
      const float* of_x = x + WIDTH * (at + i * size) + unit;
      const Register r = sigmoid(read(of_x, count) + sums[i][0]), z = sigmoid(read(of_x + size, count) + sums[i][1]);
      const Register n = tangent(read(of_x + 2 * size, count) + r * sums[i][2]), now[WIDTH] = {r, z, n};
      for (int j = 0; j < WIDTH; ++j) write(gates + WIDTH * (at + i * size) + j * size + unit, now[j], count);
      write(inner + at + i * size + unit, sums[i][2], count);
      write(hidden + at + i * size + unit, n + (read(state + i * size + unit, count) - n) * z, count);
    }
  }
};

struct Elman {
  static constexpr int WIDTH = 4;
  const float *x, *h, *bias;
  bool relu;
  float* hidden;
  Sizes sizes;
  const Panels& panels;

  template <int ROWS>
  void tile(int64_t step, int64_t row, int64_t first) const {
    const int64_t size = sizes.units, at = (step * sizes.rows + row) * size;
    Register sums[ROWS][WIDTH] = {};
    products(before(h, hidden, sizes, step, row), size, panels.at(first), size, sums);
    for (int j = 0; j < WIDTH && first + j * LANES < size; ++j) {
      const int64_t unit = first + j * LANES, count = least(LANES, size - unit);
      for (int i = 0; i < ROWS; ++i) {
        Register sum = sums[i][j] + read(x + at + i * size + unit, count);
        if (bias) sum += read(bias + unit, count);
        write(hidden + at + i * size + unit, relu ? (sum < 0 ? all(0) : sum) : tangent(sum), count);
      }
    }
  }
};

extern "C" void lstm(const float* x, const float* h, const float* c, const float* w, const float* bias, const float*,
    float* hidden, float* gates, float* cells, float* squashed, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Lstm::WIDTH, true, s->units, 1, threads);
  forwards(Lstm{x, h, c, bias, hidden, gates, cells, squashed, *s, panels}, threads);
}

extern "C" void gru(const float* x, const float* h, const float* w, const float* bias, float* hidden, float* gates,
    float* inner, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Gru::WIDTH, true, s->units, 1, threads);
  forwards(Gru{x, h, bias, hidden, gates, inner, *s, panels}, threads);
}

extern "C" void rnn(const float* x, const float* h, const float* w, const float* bias, const char* nonlinearity,
    float* hidden, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Elman::WIDTH, false, s->units, 1, threads);
  forwards(Elman{x, h, bias, nonlinearity[0] == 'r', hidden, *s, panels}, threads);
}

// --- backward --------------------------------------------------------------------------------------------------------

// What goes from a step to the one before: every_{t-1} = dh_{t-1} + W^T da_t + every_t kept_t, if anything is kept.
struct Backward {
  static constexpr int WIDTH = 4;
  const float *dh, *kept;
  float *da, *every, *first;
  Sizes sizes;
  const Panels& panels;

  template <int ROWS>
  void tile(int64_t step, int64_t row, int64_t from) const {
    const int64_t size = sizes.units, at = (step * sizes.rows + row) * size, ago = at - sizes.rows * size;
    Register sums[ROWS][WIDTH] = {};
    products(da + sizes.gates * at, sizes.gates * size, panels.at(from), sizes.gates * size, sums);
    for (int j = 0; j < WIDTH && from + j * LANES < size; ++j) {
      const int64_t unit = from + j * LANES, count = least(LANES, size - unit);
      for (int i = 0; i < ROWS; ++i) {
        const int64_t in_row = i * size + unit;
        Register sum = sums[i][j];
        if (kept) sum += read(every + at + in_row, count) * read(kept + at + in_row, count);
        if (step) sum += read(dh + ago + in_row, count);
        write((step ? every + ago : first + row * size) + in_row, sum, count);
      }
    }
  }
};

// of_row(first element, unit, count): da of these units from their `every`
template <class Row>
static void backwards(const Backward& cell, const Row& of_row, int threads) {
  const Sizes& s = cell.sizes;
  const int64_t last = (s.steps - 1) * s.rows * s.units;
  std::memcpy(cell.every + last, cell.dh + last, s.rows * s.units * sizeof(float));
#pragma omp parallel num_threads(threads)
  for (int64_t step = s.steps; step-- > 0;) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s.rows; ++row)
      for (int64_t unit = 0; unit < s.units; unit += LANES)
        of_row(step, row, unit, least(LANES, s.units - unit));
    step_of(cell, step);
  }
}

static Panels of_backward(const float* w, const Sizes& s, int threads) {
  return Panels(w, s.units, s.gates * s.units, Backward::WIDTH, false, 1, s.units, threads);
}

extern "C" void lstm_backward(const float* dh, const float* dc_last, const float* gates, const float* c,
    const float* cells, const float* squashed, const float* w, const float*, float* da, float* every, float* first,
    float* dc, const Sizes* sizes, int threads) {
  const Sizes s = *sizes;
  const Panels panels = of_backward(w, s, threads);
  std::memcpy(dc, dc_last, s.rows * s.units * sizeof(float));
  const auto of_row = [=](int64_t step, int64_t row, int64_t unit, int64_t count) {
    const int64_t at = (step * s.rows + row) * s.units;
    const float *gate = gates + 4 * at + unit, *cell_before = before(c, cells, s, step, row) + unit;
    float *to = da + 4 * at + unit, *carried = dc + row * s.units + unit;
    const Register i = read(gate, count), f = read(gate + s.units, count), g = read(gate + 2 * s.units, count);
    const Register o = read(gate + 3 * s.units, count), tanh = read(squashed + at + unit, count);
    const Register dh_now = read(every + at + unit, count), of_o = dh_now * o;
    const Register dc_now = read(carried, count) + of_o * (1 - tanh * tanh), of_i = dc_now * i;
    write(to, of_i * g * (1 - i), count);
    write(to + s.units, dc_now * f * read(cell_before, count) * (1 - f), count);
    write(to + 2 * s.units, of_i * (1 - g * g), count);
    write(to + 3 * s.units, of_o * tanh * (1 - o), count);
    write(carried, dc_now * f, count);
  };
  backwards({dh, nullptr, da, every, first, s, panels}, of_row, threads);
}

extern "C" void recurrence_backward(const float* dh, const float* kept, const float* scale, const float* w, float* da,
    float* every, float* first, const Sizes* sizes, int threads) {
  const Sizes s = *sizes;
  const Panels panels = of_backward(w, s, threads);
  const auto of_row = [=](int64_t step, int64_t row, int64_t unit, int64_t count) {
    const int64_t at = (step * s.rows + row) * s.units;
    const Register dh_now = read(every + at + unit, count);
    for (int64_t k = 0; k < s.gates; ++k) {
      const int64_t part = s.gates * at + k * s.units + unit;
      write(da + part, dh_now * read(scale + part, count), count);
    }
  };
  backwards({dh, kept, da, every, first, s, panels}, of_row, threads);
}
