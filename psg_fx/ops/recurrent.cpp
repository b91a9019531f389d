// The loops over time of psg_fx/ops/recurrent.py in float32, without a projection.
//
// A step is one parallel loop over tiles: some rows (samples) by some units, whose products are in registers when what
// is elementwise is done to them.  A thread has the same units in every step, so its part of the weights stays in its
// cache: the weights are packed once into panels, which hold what a tile reads one after the other.

#include "steps.h"

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

extern "C" void lstm_backward(const float* dh, const float* dc_last, const float* gates, const float* c,
    const float* cells, const float* squashed, const float* w, const float*, float* da, float* every, float* first,
    float* dc, const Sizes* sizes, int threads) {
  const Sizes s = *sizes;
  const Panels panels = of_backward(w, s, threads);
  std::memcpy(dc, dc_last, s.rows * s.units * sizeof(float));
  const auto of_row = [=](Register dh_now, int64_t step, int64_t row, int64_t unit, int64_t count) {
    const int64_t at = (step * s.rows + row) * s.units;
    const float *gate = gates + 4 * at + unit, *cell_before = before(c, cells, s, step, row) + unit;
    float *to = da + 4 * at + unit, *carried = dc + row * s.units + unit;
    const Register i = read(gate, count), f = read(gate + s.units, count), g = read(gate + 2 * s.units, count);
    const Register o = read(gate + 3 * s.units, count), tanh = read(squashed + at + unit, count);
    const Register of_o = dh_now * o;
    const Register dc_now = read(carried, count) + of_o * (1 - tanh * tanh), of_i = dc_now * i;
    write(to, of_i * g * (1 - i), count);
    write(to + s.units, dc_now * f * read(cell_before, count) * (1 - f), count);
    write(to + 2 * s.units, of_i * (1 - g * g), count);
    write(to + 3 * s.units, of_o * tanh * (1 - o), count);
    write(carried, dc_now * f, count);
  };
  backwards({dh, nullptr, da, every, first, s.steps, s, panels}, of_row, threads);
}

extern "C" void gru_backward(const float* dh, const float* hidden, const float* gates, const float* inner,
    const float* h, const float* w, float* dx, float* da, float* first, const Sizes* sizes, int threads) {
  const Sizes s = *sizes;
  const Panels panels = of_backward(w, s, threads);
  const Floats every(2 * s.rows * s.units);
  const auto of_row = [=](Register dh_now, int64_t step, int64_t row, int64_t unit, int64_t count) {
    const int64_t at = (step * s.rows + row) * s.units, to = 3 * at + unit;
    const Register r = read(gates + to, count), z = read(gates + to + s.units, count);
    const Register n = read(gates + to + 2 * s.units, count), of_n = dh_now * (1 - z) * (1 - n * n);
    const Register ago = read(before(h, hidden, s, step, row) + unit, count);
    const Register of_r = of_n * read(inner + at + unit, count) * r * (1 - r), of_z = dh_now * (ago - n) * z * (1 - z);
    const Register of_x[] = {of_r, of_z, of_n}, of_a[] = {of_r, of_z, of_n * r};
    for (int k = 0; k < 3; ++k) {
      write(dx + to + k * s.units, of_x[k], count);
      write(da + to + k * s.units, of_a[k], count);
    }
  };
  backwards({dh, gates + s.units, da, every.values, first, 2, s, panels}, of_row, threads);
}

extern "C" void rnn_backward(const float* dh, const float* hidden, const float* w, const char* nonlinearity, float* da,
    float* first, const Sizes* sizes, int threads) {
  const Sizes s = *sizes;
  const Panels panels = of_backward(w, s, threads);
  const Floats every(2 * s.rows * s.units);
  const bool relu = nonlinearity[0] == 'r';
  const auto of_row = [=](Register dh_now, int64_t step, int64_t row, int64_t unit, int64_t count) {
    const int64_t at = (step * s.rows + row) * s.units + unit;
    const Register now = read(hidden + at, count);
    write(da + at, dh_now * (relu ? (now > 0 ? all(1) : all(0)) : 1 - now * now), count);
  };
  backwards({dh, nullptr, da, every.values, first, 2, s, panels}, of_row, threads);
}
