// The loops over time of LSTMs, there and back (psg_fx/ops/recurrent/layers.py).

#include "steps.h"

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

extern "C" void lstm(const float* x, const float* h, const float* c, const float* w, const float* bias, const float*,
    float* hidden, float* gates, float* cells, float* squashed, const Sizes* s, int threads) {
  const Panels panels(w, s->units, s->units, Lstm::WIDTH, true, s->units, 1, threads);
  forwards(Lstm{x, h, c, bias, hidden, gates, cells, squashed, *s, panels}, threads);
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
