// Products of each sample's two matrices, and the sums of their squares (psg_fx/ops/products/products_here.py).
//
// A tile of the product lies in registers while its places are summed; then it is rounded, or not, its squares are added
// up and it is written, or not.  A band of columns is one task, whose result does not depend on how many threads there are.

#include "registers.h"

#ifdef __AVX512F__
constexpr int TALL = 8, WIDE = 2;  // rows of a tile, and its vectors
#else
constexpr int TALL = 6, WIDE = 2;  // 12 accumulators in 16 registers
#endif
constexpr int PANEL = WIDE * LANES;
constexpr int64_t BAND = 256;  // columns, a multiple of PANEL
constexpr int64_t HIGH = 8 * TALL;  // rows that are packed at once
constexpr int64_t STRETCH = 256;  // places; a sum of sums rounds less than one long sum
constexpr int64_t BEYOND_CACHES = 4 << 20;  // bytes

typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(float))));

// STREAMED: past the caches, where nobody looks for so much soon.
template <bool STREAMED>
static inline void put(void* to, Register value) {
  if constexpr (!STREAMED) {
    *reinterpret_cast<Unaligned*>(to) = value;
    return;
  }
#if defined(__clang__)
  __builtin_nontemporal_store(value, reinterpret_cast<Register*>(to));
#elif defined(__AVX512F__)
  __builtin_ia32_movntps512(reinterpret_cast<float*>(to), value);
#elif defined(__AVX__)
  __builtin_ia32_movntps256(reinterpret_cast<float*>(to), value);
#else
  *reinterpret_cast<Register*>(to) = value;
#endif
}

// To the nearest number of bfloat16, of two the one further from zero.  Only NaN may be too large to be rounded up; it is
// quiet, which is said in its upper half.
static inline Register rounded(Register value) {
  const Integers bits = (Integers)value, size = bits & 0x7fffffff, up = size + 0x8000;
  return (Register)(((up > size ? up : size) | (bits & ~0x7fffffff)) & ~0xffff);
}

// Numbers of bfloat16, those of b after those of a: the upper halves of their floats.
static inline Register side_by_side(Register a, Register b) {
  Halves halves;
#ifdef __clang__
  for (int k = 0; k < 2 * LANES; ++k) halves[k] = k < LANES ? ((Halves)a)[2 * k + 1] : ((Halves)b)[2 * (k - LANES) + 1];
  return (Register)halves;
#else
#pragma GCC unroll 32  // so that it is a constant
  for (int k = 0; k < 2 * LANES; ++k) halves[k] = 2 * k + 1;
  return (Register)__builtin_shuffle((Halves)a, (Halves)b, halves);
#endif
}

static inline void keep(float value, float* to) { *to = value; }

static inline void keep(float value, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  *to = bits >> 16;
}

static inline void write_turned(const float* from, int64_t of_row, float* to, int64_t of_column) {
  Register rows[LANES];
  for (int i = 0; i < LANES; ++i) rows[i] = read(from + i * of_row);
  turn<LANES / 2>(rows);
  for (int i = 0; i < LANES; ++i) *reinterpret_cast<Unaligned*>(to + i * of_column) = rows[i];
}

// m[n, t, size], as it lies in memory.
struct Matrices {
  const float* start;
  int64_t of_sample, of_place, of_entry, size;

  // Entries first to first + WIDTH of each place, side by side; zeros beyond the last one.
  template <int WIDTH>
  void pack(int64_t sample, int64_t places, int64_t first, float* to) const {
    const float* from = start + sample * of_sample + first * of_entry;
    const int64_t held = least(WIDTH, size - first);
    if (of_entry == 1 && held == WIDTH) {
      for (int64_t k = 0; k < places; ++k) std::memcpy(to + k * WIDTH, from + k * of_place, WIDTH * sizeof(float));
      return;
    }
    int64_t turned = 0;
    if constexpr (WIDTH % LANES == 0)
      if (of_place == 1 && held == WIDTH)
        for (; turned + LANES <= places; turned += LANES)
          for (int64_t j = 0; j < WIDTH; j += LANES)
            write_turned(from + turned + j * of_entry, of_entry, to + turned * WIDTH + j, WIDTH);
    for (int64_t k = turned; k < places; ++k)
      for (int64_t j = 0; j < WIDTH; ++j) to[k * WIDTH + j] = j < held ? from[k * of_place + j * of_entry] : 0;
  }

  // Whether those of TALL entries are read as they lie.
  bool lies_along_places(int64_t first) const { return of_place == 1 && first + TALL <= size; }
};

struct Tile {
  Register sums[TALL][WIDE] = {};

  void add(const float* left, int64_t of_place, int64_t of_entry, const float* right, int64_t places) {
    for (int64_t from = 0; from < places; from += STRETCH) {
      Register part[TALL][WIDE] = {};
      for (int64_t k = from; k < least(from + STRETCH, places); ++k, left += of_place, right += PANEL) {
        Register columns[WIDE];
        for (int j = 0; j < WIDE; ++j) columns[j] = read(right + j * LANES);
        for (int i = 0; i < TALL; ++i)
          for (int j = 0; j < WIDE; ++j) part[i][j] += left[i * of_entry] * columns[j];
      }
      for (int i = 0; i < TALL; ++i)
        for (int j = 0; j < WIDE; ++j) sums[i][j] += part[i][j];
    }
  }

  void round() {
    for (int i = 0; i < TALL; ++i)
      for (int j = 0; j < WIDE; ++j) sums[i][j] = rounded(sums[i][j]);
  }

  Register squares() const {
    Register found = {};
    for (int i = 0; i < TALL; ++i)
      for (int j = 0; j < WIDE; ++j) found += sums[i][j] * sums[i][j];
    return found;
  }

  template <bool STREAMED>
  void write(float* to, int64_t columns) const {
    for (int i = 0; i < TALL; ++i)
      for (int j = 0; j < WIDE; ++j) put<STREAMED>(to + i * columns + j * LANES, sums[i][j]);
  }

  template <bool STREAMED>
  void write(uint16_t* to, int64_t columns) const {
    static_assert(WIDE == 2);
    for (int i = 0; i < TALL; ++i) put<STREAMED>(to + i * columns, side_by_side(sums[i][0], sums[i][1]));
  }

  template <typename Kept>
  void write_part(Kept* to, int64_t columns, int64_t height, int64_t width) const {
    for (int64_t i = 0; i < height; ++i)
      for (int64_t j = 0; j < width; ++j) keep(sums[i][j / LANES][j % LANES], to + i * columns + j);
  }
};

struct Task {
  int64_t sample, first, count;  // columns
};

// x[n, t, i], y[n, t, o] -> product[n, i, o], or none.  Kept: float, or the upper halves of numbers of bfloat16.
template <typename Kept>
struct Products {
  Matrices x, y;
  int64_t places;
  Kept* product;
  bool streamed;

  Task task(int64_t number) const {
    const int64_t bands = up(y.size, BAND), first = number % bands * BAND;
    return {number / bands, first, least(BAND, y.size - first)};
  }

  // The sum of the squares of a band of columns.
  double run(const Task& here, float* panels, float* rows) const {
    for (int64_t j = 0; j < here.count; j += PANEL) y.pack<PANEL>(here.sample, places, here.first + j, panels + j * places);
    double squares = 0;
    for (int64_t i = 0; i < x.size; i += HIGH) squares += part(here, i, least(HIGH, x.size - i), panels, rows);
    return squares;
  }

  // The same of `count` rows: a panel is read from a near cache for all but the first tile.
  float part(const Task& here, int64_t first, int64_t count, const float* panels, float* rows) const {
    for (int64_t i = 0; i < count; i += TALL)
      if (!x.lies_along_places(first + i)) x.pack<TALL>(here.sample, places, first + i, rows + i * places);
    Register squares = {};
    for (int64_t j = 0; j < here.count; j += PANEL)
      for (int64_t i = 0; i < count; i += TALL) squares += tile(here, first + i, j, panels + j * places, rows + i * places);
    return sum_of(squares);
  }

  Register tile(const Task& here, int64_t i, int64_t j, const float* panel, const float* packed) const {
    Tile tile;
    if (x.lies_along_places(i)) tile.add(x.start + here.sample * x.of_sample + i * x.of_entry, 1, x.of_entry, panel, places);
    else tile.add(packed, TALL, 1, panel, places);
    if constexpr (sizeof(Kept) < sizeof(float)) tile.round();
    if (product) {
      Kept* to = product + (here.sample * x.size + i) * y.size + here.first + j;
      const int64_t height = least(TALL, x.size - i), width = least(PANEL, here.count - j);
      if (height < TALL || width < PANEL) tile.write_part(to, y.size, height, width);
      else if (streamed) tile.template write<true>(to, y.size);
      else tile.template write<false>(to, y.size);
    }
    return tile.squares();
  }
};

template <typename Kept>
static void run(const Matrices& x, const Matrices& y, void* product, float* squares, int64_t n, int64_t t, int threads) {
  const bool aligned = reinterpret_cast<uintptr_t>(product) % LINE == 0 && y.size * sizeof(Kept) % sizeof(Register) == 0;
  const bool streamed = aligned && n * x.size * y.size * int64_t(sizeof(Kept)) >= BEYOND_CACHES;
  const Products<Kept> made = {x, y, t, static_cast<Kept*>(product), streamed};
  const int64_t bands = up(y.size, BAND), tasks = n * bands;
  const Room sums(2 * tasks);
  double* of_tasks = reinterpret_cast<double*>(sums.values);
#pragma omp parallel num_threads(threads)
  {
    const Room panels(t * least(BAND, up(y.size, PANEL) * PANEL)), rows(t * HIGH);
#pragma omp for schedule(static)
    for (int64_t k = 0; k < tasks; ++k) of_tasks[k] = made.run(made.task(k), panels.values, rows.values);
    __sync_synchronize();  // what is streamed
  }
  for (int64_t s = 0; s < n; ++s) {
    double sum = 0;
    for (int64_t k = s * bands; k < (s + 1) * bands; ++k) sum += of_tasks[k];
    squares[s] = float(sum);
  }
}

// strides: those of x[n, t, i], then those of y[n, t, o].  product[n, i, o], or none, in float32 or, `halves`, rounded to
// bfloat16; squares[n], those of the product as it is kept.
extern "C" void products(const float* x, const float* y, void* product, float* squares, int64_t n, int64_t t, int64_t i,
                         int64_t o, const int64_t* strides, int64_t halves, int threads) {
  const Matrices left = {x, strides[0], strides[1], strides[2], i}, right = {y, strides[3], strides[4], strides[5], o};
  (halves ? run<uint16_t> : run<float>)(left, right, product, squares, n, t, threads);
}
