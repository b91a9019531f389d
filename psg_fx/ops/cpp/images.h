// Images as a convolution of step one reads them: row after row with zeros around, so that places of the kernel are
// distances.  Pixel p of the output meets pixel p + i · wide() + j of the image at place (i, j) of the kernel; where a
// row of the output has ended, what is computed is not wanted.

#include "parts.h"

typedef uint32_t UnalignedBits __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(uint32_t))));

// Rows of the output.
struct Rows {
  int64_t first, count;
};

// As psg_fx/ops/products/convolutions_in_parts.py passes it.
struct Window {
  int64_t samples, channels, height, width, outputs;
  int64_t kernel_height, kernel_width, pad_height, pad_width, dilation_height, dilation_width;

  int64_t places() const { return kernel_height * kernel_width; }
  int64_t reach_height() const { return dilation_height * (kernel_height - 1); }
  int64_t reach_width() const { return dilation_width * (kernel_width - 1); }
  int64_t wide() const { return width + 2 * pad_width; }
  int64_t out_height() const { return height + 2 * pad_height - reach_height(); }
  int64_t out_width() const { return wide() - reach_width(); }
  int64_t out_area() const { return out_height() * out_width(); }

  int64_t distance(int64_t place) const {
    return place / kernel_width * dilation_height * wide() + place % kernel_width * dilation_width;
  }

  // Pixels of so many rows of the output, up to the last that is wanted.
  int64_t pixels(int64_t rows) const { return (rows - 1) * wide() + out_width(); }

  // Rows of an image for each of that many pieces, all of one size but the last.
  Rows rows(int64_t piece, int64_t pieces) const {
    const int64_t each = up(out_height(), pieces), first = piece * each;
    return {first, least(each, out_height() - first)};
  }

  // Pixels of row r of the padded image, of a channel; none where it is all zeros.
  const float* row(const float* image, int64_t channel, int64_t r) const {
    const bool inside = channel < channels && r >= pad_height && r < pad_height + height;
    return inside ? image + (channel * height + r - pad_height) * width : nullptr;
  }
};

// The first so many numbers, at most sixteen, and zeros.
static inline Register read_some(const float* from, int64_t count) {
  if (count >= LANES) return read(from);
  Register some = {};
  std::memcpy(&some, from, count * sizeof(float));
  return some;
}

// The same as a call of memcpy, which takes longer than a row of a small image.
static inline void copy_row(const float* from, int64_t count, float* to) {
  if (count < LANES) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  for (int64_t i = 0; i + LANES <= count; i += LANES) *reinterpret_cast<Unaligned*>(to + i) = read(from + i);
  *reinterpret_cast<Unaligned*>(to + count - LANES) = read(from + count - LANES);
}
