// The loops over time of Elman's recurrent layers, there and back (psg_fx/ops/recurrent/layers.py).

#include "steps.h"

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

extern "C" void rnn(const float* x, const float* h, const float* w, const float* bias, const char* nonlinearity,
    float* hidden, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Elman::WIDTH, false, s->units, 1, threads);
  forwards(Elman{x, h, bias, nonlinearity[0] == 'r', hidden, *s, panels}, threads);
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
