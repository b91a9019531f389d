// The loops over time of GRUs, there and back (psg_fx/ops/recurrent/layers.py).

#include "steps.h"

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

extern "C" void gru(const float* x, const float* h, const float* w, const float* bias, float* hidden, float* gates,
    float* inner, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Gru::WIDTH, true, s->units, 1, threads);
  forwards(Gru{x, h, bias, hidden, gates, inner, *s, panels}, threads);
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
