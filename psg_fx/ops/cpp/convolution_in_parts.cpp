// A convolution of step one, in float32, by a matrix unit of bfloat16 (psg_fx/ops/products/convolutions_in_parts.py).
//
// A block is 32 outputs × 32 pixels: weights, [outputs, channels], on the left, pixels, [channels, pixels], on the
// right, for each place of the kernel.  Pixels are packed once for all places: a row of a tile is read at any distance.

#include <omp.h>

#include "images.h"

constexpr int64_t WEIGHTS = 1 << 20, PIXELS = 3 << 17;  // bytes that are packed at once, of all threads and of each
constexpr int64_t DEEPEST = 576;                        // numbers of a sum in the unit, which then is added to others

// Channels of an image, and rows, packed as [blocks of 32 channels, parts, 16 pairs, pixels].
struct Planes {
  const Window* window = nullptr;
  const float* image = nullptr;
  int64_t channel = 0, blocks = 0, first = 0, rows = 0;  // rows of the padded image
  int64_t plane = 0;  // pixels from a pair to the next
  Part* to = nullptr;
  int64_t next = 0;

  bool is_done() const { return next == blocks * SIDE * rows; }

  // A row of a pair of channels.
  void go_on() {
    const int64_t r = next % rows, pair = next / rows % SIDE, block = next / rows / SIDE;
    ++next;
    const int64_t c = channel + block * DEPTH + pair;
    const float *a = window->row(image, c, first + r), *b = window->row(image, c + SIDE, first + r);
    Part* const at = to + (block * PARTS * SIDE + pair) * plane * 2 + (r * window->wide() + window->pad_width) * 2;
    const int64_t width = window->width;
    for (int64_t done = 0; done < width; done += LANES) {
      // The last ones, some of them for the second time.
      const int64_t p = done > 0 ? least(done, width - LANES) : 0;
      Bits parts[PARTS];
      split(a ? read_some(a + p, width) : Register{}, b ? read_some(b + p, width) : Register{}, parts);
      for (int part = 0; part < PARTS; ++part)
        *reinterpret_cast<UnalignedBits*>(at + part * SIDE * plane * 2 + p * 2) = parts[part];
    }
  }

  void finish() {
    while (!is_done()) go_on();
  }
};

// The pixels that a place of the kernel meets.
struct Pixels {
  const Part* start;
  const int64_t* distances;  // of each step, in numbers
  int64_t of_part, of_row;
  static constexpr int64_t apart = 2 * SIDE;

  const Part* at(int64_t step, int part) const { return start + distances[step] + part * of_part; }
};

// Pixels of a block that lie side by side in a row of the output.
struct Segment {
  int64_t from, to, count;
};

struct Writing {
  float *block, *other;
  int64_t area = 0;
  float* to = nullptr;
  const float* bias = nullptr;
  int64_t outputs = 0, next = 0, segments = 0;
  bool anew = true, wide = false;  // whether there was nothing yet; whether the block has a second tile of pixels
  Segment segment[BLOCK];
  Largest largest = {};

  // Outputs from o on, of an image; pixels from p on of those rows.
  void begin(const Window& window, Rows rows, int64_t p, int64_t o, float* image, const float* biases, bool first) {
    float* const computed = other;
    other = block, block = computed, next = 0, anew = first, area = window.out_area();
    outputs = least(BLOCK, window.outputs - o);
    to = image + o * area + rows.first * window.out_width();
    bias = biases && first ? biases + o : nullptr;
    segments = 0;
    const int64_t end = least(p + BLOCK, window.pixels(rows.count));
    wide = end - p > SIDE;
    for (int64_t r = p / window.wide(); r * window.wide() < end; ++r) {
      const int64_t start = r * window.wide(), from = p > start ? p : start;
      const int64_t stop = least(end, start + window.out_width());
      if (from < stop) segment[segments++] = {from - p, r * window.out_width() + from - start, stop - from};
    }
  }

  bool is_done() const { return next == outputs; }

  void go_on() {
    const float* from = block + next * BLOCK;
    float* const at = to + next * area;
    const float added = bias ? bias[next] : 0;
    ++next;
    largest.see(read(from));
    if (wide) largest.see(read(from + SIDE));
    for (int64_t s = 0; s < segments; ++s) write(from + segment[s].from, at + segment[s].to, segment[s].count, added);
  }

  void write(const float* from, float* at, int64_t count, float added) const {
    if (count < LANES) {
      for (int64_t j = 0; j < count; ++j) at[j] = from[j] + (anew ? added : at[j]);
      return;
    }
    const int64_t last = count - LANES;  // all are read before any is written, since the two may overlap
    const Register a = read(from) + (anew ? Register{} + added : read(at));
    const Register b = read(from + last) + (anew ? Register{} + added : read(at + last));
    *reinterpret_cast<Unaligned*>(at) = a;
    *reinterpret_cast<Unaligned*>(at + last) = b;
  }

  void finish() {
    while (!is_done()) go_on();
  }
};

// weights[outputs, channels, places], as they lie in memory.
struct Weights {
  const float* start;
  int64_t of_output, of_channel, of_height, of_width;
};

struct Convolution {
  const Window& window;
  const float *x, *bias;
  float* y;
  const Weights weights;
  int64_t deep, pieces;  // channels of a stage, pieces of an image
  Part* packed_weights;  // of a stage, [tiles of outputs, steps, parts]
  int64_t* distances;    // of the steps of a stage

  int64_t stages() const { return up(window.channels, deep); }
  int64_t blocks(int64_t stage) const { return up(least(deep, window.channels - stage * deep), DEPTH); }
  int64_t steps(int64_t stage) const { return blocks(stage) * window.places(); }
  int64_t rows() const { return up(window.out_height(), pieces) + window.reach_height(); }

  // An odd number of lines of the cache, so that the rows of a tile do not all want the same place of it.
  int64_t plane() const { return (up(rows() * window.wide() + 2 * BLOCK, SIDE) | 1) * SIDE; }

  void pack_weights(int64_t stage, int thread, int threads, float* room) const {
    const int64_t places = window.places();
    for (int64_t k = steps(stage) * thread / threads; k < steps(stage) * (thread + 1) / threads; ++k) {
      const int64_t i = k % places / window.kernel_width, j = k % places % window.kernel_width;
      const Operand here = {weights.start + i * weights.of_height + j * weights.of_width, weights.of_output,
                            weights.of_channel, window.outputs, window.channels, false};
      const int64_t channel = stage * deep + k / places * DEPTH;
      for (int64_t tile = 0; tile < up(window.outputs, SIDE); ++tile)
        for (int piece = 0; piece < here.pieces(); ++piece)
          here.pack(piece, tile * SIDE, channel, packed_weights + (tile * steps(stage) + k) * STEP, room);
      distances[k] = k / places * PARTS * SIDE * plane() * 2 + window.distance(k % places) * 2;
    }
  }

  Planes packing(int64_t stage, int64_t piece, Part* to) const {
    const Rows here = window.rows(piece % pieces, pieces);
    const float* image = x + piece / pieces * window.channels * window.height * window.width;
    const int64_t count = here.count > 0 ? here.count + window.reach_height() : 0;
    return {&window, image, stage * deep, blocks(stage), here.first, count, plane(), to};
  }

  void multiply_piece(int64_t stage, int64_t piece, const Part* planes, Meanwhile<Writing, Planes>& meanwhile) const {
    const Rows here = window.rows(piece % pieces, pieces);
    float* const image = y + piece / pieces * window.outputs * window.out_area();
    const int64_t pixels = here.count > 0 ? window.pixels(here.count) : 0;
    Writing& writing = meanwhile.writing;
    for (int64_t p = 0; p < pixels; p += BLOCK)
      for (int64_t o = 0; o < window.outputs; o += BLOCK) {
        const InSteps left = {packed_weights + o / SIDE * steps(stage) * STEP, steps(stage) * STEP};
        const Pixels right = {planes + p * 2, distances, SIDE * plane() * 2, plane() * 2 * int64_t(sizeof(Part))};
        multiply(left, right, steps(stage), window.outputs - o, pixels - p, writing.other, meanwhile);
        writing.finish();
        writing.begin(window, here, p, o, image, bias, stage == 0);
      }
  }

  bool run(int thread, int threads) const {
    const Unit unit;
    const int64_t numbers = blocks(0) * PARTS * SIDE * plane();
    const Floats a(numbers), b(numbers);
    const Room block(BLOCK * BLOCK), other(BLOCK * BLOCK), room(TILE);
    const int64_t count = window.samples * pieces, begin = count * thread / threads;
    const int64_t end = count * (thread + 1) / threads;
    Part *now = reinterpret_cast<Part*>(a.values), *next = reinterpret_cast<Part*>(b.values);
    Meanwhile<Writing, Planes> meanwhile = {{block.values, other.values}};
    for (int64_t stage = 0; stage < stages(); ++stage) {
      pack_weights(stage, thread, threads, room.values);
      if (begin < end) packing(stage, begin, now).finish();
#pragma omp barrier
      multiply_pieces(
          begin, end, now, next, meanwhile, [&](int64_t piece, Part* to) { return packing(stage, piece, to); },
          [&](int64_t piece, const Part* packed) { multiply_piece(stage, piece, packed, meanwhile); });
#pragma omp barrier
    }
    meanwhile.writing.finish();
    return meanwhile.writing.largest.is_usual();
  }
};

// y = convolution of x with weights, and bias, or none; sizes: a Window; strides: those of the weights, of outputs,
// channels, rows and columns.  Whether it is to be believed (psg_fx/ops/in_parts.cpp).
extern "C" int convolution_in_parts(const float* x, const float* weights, const float* bias, float* y,
                                    const Window* sizes, const int64_t* strides, int threads) {
  const Window& window = *sizes;
  const int64_t of_block = up(window.outputs, SIDE) * window.places() * STEP * int64_t(sizeof(Part));
  const int64_t most = least(WEIGHTS / of_block, DEEPEST / (window.places() * DEPTH));
  const int64_t blocks = up(window.channels, DEPTH), stages = up(blocks, most > 0 ? most : 1);
  const int64_t deep = up(blocks, stages) * DEPTH;
  const int64_t pixels = (window.height + 2 * window.pad_height) * window.wide();
  const int64_t of_image = deep * PARTS * int64_t(sizeof(Part)) * pixels;
  int64_t pieces = up(of_image, PIXELS);
  if (window.samples * pieces < 2 * threads) pieces = up(2 * threads, window.samples);
  pieces = least(pieces, window.out_height());
  const int64_t steps = deep / DEPTH * window.places();
  const Tiles packed(up(window.outputs, BLOCK) * 2 * steps);
  const Room distances(2 * steps);
  const Convolution convolution = {window, x, bias, y, {weights, strides[0], strides[1], strides[2], strides[3]},
                                   deep, pieces, packed.parts(), reinterpret_cast<int64_t*>(distances.values)};
  int usual = 1;
#pragma omp parallel num_threads(threads) reduction(& : usual)
  usual &= convolution.run(omp_get_thread_num(), omp_get_num_threads());
  return usual;
}
