// Gradients of weights of a convolution of step one, in float32, by a matrix unit of bfloat16
// (psg_fx/ops/products/convolutions_in_parts.py).
//
// A block is 32 outputs × 32 channels of a place of the kernel: the cotangent, [outputs, pixels], on the left, the
// image, [pixels, channels], on the right, both with pixels as they follow each other in the padded image.  Both are
// packed once for all places.  The image is packed pixel by pixel, each beside the one sixteen pixels on, so that a
// tile may begin at any pixel; each is there twice, therefore.

#include <omp.h>

#include "images.h"

constexpr int64_t PIXELS = 3 << 18;  // bytes of both operands that a thread packs at once

// What of both operands is packed: some rows of a sample's image, and some of the outputs.
struct Piece {
  int64_t sample, output, outputs;
  Rows rows;
};

struct Layout {
  const Window& window;
  int64_t rows;  // of the output, in the largest piece
  int64_t steps() const { return up(window.pixels(rows), DEPTH); }
  // Pixels of the image that its tiles may begin at, or reach.
  int64_t pixels() const { return (steps() * 2 + up(window.distance(window.places() - 1), SIDE)) * SIDE; }
  int64_t of_part() const { return pixels() * 2 * SIDE; }
  int64_t of_channels() const { return PARTS * of_part(); }
  int64_t of_left(int64_t outputs) const { return up(outputs, SIDE) * steps() * STEP; }
  int64_t of_right() const { return up(window.channels, SIDE) * of_channels(); }
};

struct PackingBoth {
  const Layout* layout = nullptr;
  const float *cotangent = nullptr, *image = nullptr;
  Piece piece;
  Part *left = nullptr, *right = nullptr;
  float* room = nullptr;  // of size()
  int64_t output = 0, channel = 0, next = 0;

  // Rows one after the other of an output, or of sixteen channels, with zeros between them that are never written to;
  // then two squares of registers.
  static int64_t size(const Layout& layout) { return layout.steps() * DEPTH + SIDE * pitch(layout) + 2 * SIDE * SIDE; }
  static int64_t pitch(const Layout& layout) { return layout.pixels() + SIDE; }
  float* flat_output() const { return room; }
  float* flat_channel(int64_t i) const { return room + layout->steps() * DEPTH + i * pitch(*layout); }
  bool packs_left() const { return output < up(piece.outputs, SIDE) * SIDE; }
  bool is_done() const { return !layout || channel >= layout->window.channels; }

  void go_on() {
    if (packs_left()) next == 0 ? copy_output() : pack_output();
    else next < SIDE ? copy_channel() : pack_channels();
  }

  void copy_output() {
    const Window& window = layout->window;
    const int64_t o = piece.output + output, width = window.out_width(), end = window.pixels(piece.rows.count);
    const float* from = cotangent + (o * window.out_height() + piece.rows.first) * width;
    for (int64_t r = 0; r < piece.rows.count; ++r)
      if (output < piece.outputs) copy_row(from + r * width, width, flat_output() + r * window.wide());
      else std::memset(flat_output() + r * window.wide(), 0, width * sizeof(float));
    std::memset(flat_output() + end, 0, (up(end, DEPTH) * DEPTH - end) * sizeof(float));  // of a piece with more rows
    next = 1;
  }

  void pack_output() {
    const int64_t steps = layout->steps();
    Part* const to = left + output / SIDE * steps * STEP + output % SIDE * DEPTH;
    for (int64_t k = (next - 1) * 4; k < least(steps, next * 4); ++k) {
      Bits parts[PARTS];
      split(read(flat_output() + k * DEPTH), read(flat_output() + k * DEPTH + SIDE), parts);
      for (int part = 0; part < PARTS; ++part) *reinterpret_cast<Bits*>(to + k * STEP + part * TILE) = parts[part];
    }
    if (next++ * 4 >= steps) next = 0, ++output;
  }

  void copy_channel() {
    const Window& window = layout->window;
    for (int64_t r = 0; r < piece.rows.count + window.reach_height(); ++r) {
      float* const to = flat_channel(next) + r * window.wide() + window.pad_width;
      if (const float* from = window.row(image, channel + next, piece.rows.first + r)) copy_row(from, window.width, to);
      else std::memset(to, 0, window.width * sizeof(float));
    }
    ++next;
  }

  // Sixteen pixels of sixteen channels, turned, then four of them at a time beside those that are sixteen pixels on.
  void pack_channels() {
    const int64_t q = (next - SIDE) / 5 * SIDE, quarter = (next - SIDE) % 5 - 1;
    ++next;
    Register* const turned = reinterpret_cast<Register*>(flat_channel(SIDE));
    if (quarter < 0) return turn_pixels(q, turned);
    Part* const to = right + channel / SIDE * layout->of_channels() + q * 2 * SIDE;
    for (int64_t i = quarter * 4; i < quarter * 4 + 4; ++i) {
      Bits parts[PARTS];
      split(turned[i], turned[SIDE + i], parts);
      for (int part = 0; part < PARTS; ++part)
        *reinterpret_cast<Bits*>(to + part * layout->of_part() + i * 2 * SIDE) = parts[part];
    }
    if (quarter == 3 && q + SIDE == layout->pixels()) next = 0, channel += SIDE;
  }

  void turn_pixels(int64_t q, Register* turned) const {
    Register rows[SIDE];
    for (int half = q == 0 ? 0 : 1; half < 2; ++half) {
      if (half == 1 && q > 0)
        for (int i = 0; i < SIDE; ++i) turned[i] = turned[SIDE + i];
      for (int i = 0; i < SIDE; ++i) rows[i] = read(flat_channel(i) + q + half * SIDE);
      turn<SIDE / 2>(rows);
      for (int i = 0; i < SIDE; ++i) turned[half * SIDE + i] = rows[i];
    }
  }

  void finish() {
    while (!is_done()) go_on();
  }
};

// Pixels from a place of the kernel on, of all channels.
struct Pixels {
  const Part* start;
  int64_t of_part, apart;
  static constexpr int64_t of_row = 2 * SIDE * sizeof(Part);

  const Part* at(int64_t step, int part) const { return start + part * of_part + step * DEPTH * 2 * SIDE; }
};

struct Writing {
  float *block, *other;
  float* to = nullptr;
  int64_t of_output = 0, of_channel = 0, height = 0, width = 0, next = 0;
  bool anew = true;
  Largest largest = {};

  void begin(const Window& window, float* gradient, int64_t o, int64_t c, int64_t place, int64_t outputs, bool first) {
    float* const computed = other;
    other = block, block = computed, next = 0, anew = first;
    of_channel = window.places(), of_output = window.channels * of_channel;
    to = gradient + o * of_output + c * of_channel + place;
    height = least(BLOCK, outputs), width = least(BLOCK, window.channels - c);
  }

  bool is_done() const { return next == height; }

  void go_on() {
    const float* from = block + next * BLOCK;
    float* const at = to + next++ * of_output;
    largest.see(read(from));
    if (width > SIDE) largest.see(read(from + SIDE));
    if (anew)
      for (int64_t j = 0; j < width; ++j) at[j * of_channel] = from[j];
    else
      for (int64_t j = 0; j < width; ++j) at[j * of_channel] += from[j];
  }

  void finish() {
    while (!is_done()) go_on();
  }
};

struct Gradients {
  const Window& window;
  const float *cotangents, *x;
  float *to, *sums;  // of each sample; or of all, one for each thread
  const Layout layout;
  int64_t shares, bands;  // of the outputs, of the rows

  int64_t numbers() const { return window.outputs * window.channels * window.places(); }

  Piece piece(int64_t number) const {
    const int64_t sample = number / bands / shares, share = number / bands % shares;
    const int64_t each = up(up(window.outputs, BLOCK), shares) * BLOCK, output = least(share * each, window.outputs);
    return {sample, output, least(each, window.outputs - output), window.rows(number % bands, bands)};
  }

  PackingBoth packing(int64_t number, Part* packed, float* room) const {
    const Piece here = piece(number);
    if (here.rows.count <= 0 || here.outputs == 0) return {};
    const float* cotangent = cotangents + here.sample * window.outputs * window.out_area();
    const float* image = x + here.sample * window.channels * window.height * window.width;
    return {&layout, cotangent, image, here, packed, packed + layout.of_left(window.outputs), room};
  }

  void multiply_piece(int64_t number, const Part* packed, bool first, float* own,
                      Meanwhile<Writing, PackingBoth>& meanwhile) const {
    const Piece here = piece(number);
    if (here.rows.count <= 0) return;
    float* const gradient = own ? own : to + here.sample * numbers();
    const Part* pixels = packed + layout.of_left(window.outputs);
    const int64_t apart = layout.steps() * STEP;
    const int64_t steps = up(window.pixels(here.rows.count), DEPTH);
    Writing& writing = meanwhile.writing;
    for (int64_t o = 0; o < here.outputs; o += BLOCK)
      for (int64_t c = 0; c < window.channels; c += BLOCK)
        for (int64_t place = 0; place < window.places(); ++place) {
          const InSteps left = {packed + o / SIDE * apart, apart};
          const Part* start = pixels + c / SIDE * layout.of_channels() + window.distance(place) * 2 * SIDE;
          const Pixels right = {start, layout.of_part(), layout.of_channels()};
          multiply(left, right, steps, here.outputs - o, window.channels - c, writing.other, meanwhile);
          writing.finish();
          writing.begin(window, gradient, here.output + o, c, place, here.outputs - o, first);
        }
  }

  bool run(int thread, int threads) const {
    const Unit unit;
    const int64_t of_piece = layout.of_left(window.outputs) + layout.of_right();
    const Room a(of_piece / 2), b(of_piece / 2), block(BLOCK * BLOCK), other(BLOCK * BLOCK);
    const Floats room(PackingBoth::size(layout));
    float* const own = sums ? sums + thread * numbers() : nullptr;
    // All bands of a sample's share are of one thread.
    const int64_t count = window.samples * shares;
    const int64_t begin = count * thread / threads * bands, end = count * (thread + 1) / threads * bands;
    Part *now = reinterpret_cast<Part*>(a.values), *next = reinterpret_cast<Part*>(b.values);
    Meanwhile<Writing, PackingBoth> meanwhile = {{block.values, other.values}};
    if (own) std::memset(own, 0, numbers() * sizeof(float));
    if (begin < end) packing(begin, now, room.values).finish();
    multiply_pieces(
        begin, end, now, next, meanwhile, [&](int64_t number, Part* to) { return packing(number, to, room.values); },
        [&](int64_t number, const Part* packed) {
          multiply_piece(number, packed, !own && number % bands == 0, own, meanwhile);
        });
    meanwhile.writing.finish();
    if (own) add_up(thread, threads);
    return meanwhile.writing.largest.is_usual();
  }

  void add_up(int thread, int threads) const {
#pragma omp barrier
    for (int64_t i = numbers() * thread / threads; i < numbers() * (thread + 1) / threads; ++i) {
      float sum = 0;
      for (int t = 0; t < threads; ++t) sum += sums[t * numbers() + i];
      to[i] = sum;
    }
  }
};

// Gradients [samples, outputs, channels, places] of weights, or, if summed, their sum over samples; sizes: a Window.
// Whether they are to be believed (psg_fx/ops/in_parts.cpp).
extern "C" int weight_gradients_in_parts(const float* cotangents, const float* x, float* to, const Window* sizes,
                                         int summed, int threads) {
  const Window& window = *sizes;
  const Layout whole = {window, window.out_height()};
  const int64_t bytes = (whole.of_left(window.outputs) + whole.of_right()) * int64_t(sizeof(Part));
  const int64_t bands = least(up(bytes, PIXELS), window.out_height());
  const int64_t shares = least(up(threads, window.samples), up(window.outputs, BLOCK));
  const int64_t numbers = window.outputs * window.channels * window.places();
  const Room sums(summed ? threads * numbers : 0);
  const Gradients gradients = {window, cotangents, x, to, summed ? sums.values : nullptr,
                               {window, up(window.out_height(), bands)}, shares, bands};
  int usual = 1;
#pragma omp parallel num_threads(threads) reduction(& : usual)
  usual &= gradients.run(omp_get_thread_num(), omp_get_num_threads());
  return usual;
}
