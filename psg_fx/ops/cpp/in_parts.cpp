// A product of two matrices of float32 by a matrix unit of bfloat16 (psg_fx/ops/products/in_parts.py).
//
// Some rows and places of the smaller operand, a band, are packed for all threads; the rows of the larger one are dealt
// among them.  A thread multiplies strip after strip of these by the band, and while the unit does, it writes the last
// block and packs the next strip.

#include <omp.h>

#include "parts.h"

constexpr int64_t BAND = 512;  // rows of the smaller operand
constexpr int64_t AREA = BAND * 256, DEEPEST = 512;  // numbers of a band, which stays in the second cache, and places

struct Target {
  float* start;
  const float* bias;
  int64_t rows, columns;
};

// Two blocks in turns: one is computed, while the other goes row by row to where it belongs.
struct Writing {
  float *block, *other;
  float* to = nullptr;
  const float* bias = nullptr;
  int64_t columns = 0, height = 0, width = 0, next = 0;
  bool anew = true;  // nothing is there to which it is added
  Largest largest = {};

  void begin(const Target& target, int64_t row, int64_t column, bool first) {
    float* const computed = other;
    other = block, block = computed, next = 0, anew = first;
    to = target.start + row * target.columns + column, columns = target.columns;
    bias = target.bias && first ? target.bias + column : nullptr;
    height = least(BLOCK, target.rows - row), width = least(BLOCK, target.columns - column);
  }

  bool is_done() const { return next == height; }

  void go_on() {
    const float* from = block + next * BLOCK;
    float* at = to + next++ * columns;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
      Register value = read(from + j);
      if (!anew) value += read(at + j);
      else if (bias) value += read(bias + j);
      largest.see(value);
      *reinterpret_cast<Unaligned*>(at + j) = value;
    }
    for (; j < width; ++j) {
      at[j] = from[j] + (!anew ? at[j] : bias ? bias[j] : 0);
      largest.see(Register{at[j]});
    }
  }

  void finish() {
    while (!is_done()) go_on();
  }
};

// Rows and places of the smaller operand.
struct Band {
  int64_t row, count, place, depth;
};

struct Product {
  const Operand &strips, &bands;
  const Target target;
  Part* packed_band;
  int64_t deep;

  int64_t stages() const { return up(bands.rows, BAND) * up(bands.places, deep); }

  Band band(int64_t stage) const {
    const int64_t parts = up(bands.places, deep), row = stage / parts * BAND, place = stage % parts * deep;
    return {row, least(BAND, bands.rows - row), place, least(deep, bands.places - place)};
  }

  // A thread's share, in tiles.
  Packing packing(int64_t stage, int thread, int threads, float* room) const {
    const Band here = band(stage);
    const int64_t tiles = up(here.count, SIDE), begin = tiles * thread / threads, end = tiles * (thread + 1) / threads;
    Part* const to = packed_band + begin * up(here.depth, DEPTH) * STEP;
    return Packing(bands, here.row + begin * SIDE, (end - begin) * SIDE, here.place, here.depth, to, room);
  }

  Packing packing_strip(int64_t stage, int64_t strip, Part* to, float* room) const {
    const Band here = band(stage);
    const int64_t row = strip * BLOCK, count = least(BLOCK, strips.rows - row);
    return Packing(strips, row, count, here.place, here.depth, to, room);
  }

  void multiply_strip(int64_t stage, int64_t strip, const Part* packed, Meanwhile<Writing, Packing>& meanwhile) const {
    const Band here = band(stage);
    const int64_t steps = up(here.depth, DEPTH), apart = steps * STEP;
    Writing& writing = meanwhile.writing;
    for (int64_t j = 0; j < here.count; j += BLOCK) {
      const InSteps of_strip = {packed, apart}, of_band = {packed_band + j / SIDE * apart, apart};
      const int64_t of_strips = strip * BLOCK, of_bands = here.row + j;
      const int64_t row = bands.right ? of_strips : of_bands, column = bands.right ? of_bands : of_strips;
      multiply(bands.right ? of_strip : of_band, bands.right ? of_band : of_strip, steps, target.rows - row,
               target.columns - column, writing.other, meanwhile);
      writing.finish();
      writing.begin(target, row, column, here.place == 0);
    }
  }

  bool run(int thread, int threads) const {
    const Unit unit;
    const Tiles a(2 * deep / DEPTH), b(2 * deep / DEPTH);
    const Room block(BLOCK * BLOCK), other(BLOCK * BLOCK), room(TILE);
    const int64_t count = up(strips.rows, BLOCK), begin = count * thread / threads, end = count * (thread + 1) / threads;
    Part *now = a.parts(), *next = b.parts();
    Meanwhile<Writing, Packing> meanwhile = {{block.values, other.values}};
    for (int64_t stage = 0; stage < stages(); ++stage) {
      packing(stage, thread, threads, room.values).finish();
      if (begin < end) packing_strip(stage, begin, now, room.values).finish();
#pragma omp barrier
      multiply_pieces(
          begin, end, now, next, meanwhile,
          [&](int64_t strip, Part* to) { return packing_strip(stage, strip, to, room.values); },
          [&](int64_t strip, const Part* packed) { multiply_strip(stage, strip, packed, meanwhile); });
#pragma omp barrier
    }
    meanwhile.writing.finish();
    return meanwhile.writing.largest.is_usual();
  }
};

// a[m, k] b[k, n] + bias[n], or without it; strides: those of a, then those of b.  Whether it is to be believed: not if
// there are numbers that are not finite, of which float32 may have fewer, or if what a thread has written is all tiny, so
// that parts were taken for zero.
extern "C" int in_parts(const float* a, const float* b, const float* bias, float* to, int64_t m, int64_t k, int64_t n,
                        const int64_t* strides, int threads) {
  const Operand left = {a, strides[0], strides[1], m, k, false}, right = {b, strides[3], strides[2], n, k, true};
  const Operand &bands = m < n ? left : right, &strips = m < n ? right : left;
  const int64_t most = least(AREA / least(BAND, bands.rows), DEEPEST), parts = k < most ? 1 : (k + most / 2) / most;
  const int64_t deep = up(up(k, parts), DEPTH) * DEPTH;
  const int64_t steps = up(least(bands.rows, BAND), SIDE) * deep / DEPTH;
  const Tiles of_band(steps);
  const Product product = {strips, bands, {to, bias, m, n}, of_band.parts(), deep};
  int usual = 1;
#pragma omp parallel num_threads(threads) reduction(& : usual)
  usual &= product.run(omp_get_thread_num(), omp_get_num_threads());
  return usual;
}
