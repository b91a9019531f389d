// Vectors of float32 in registers.  psg_fx/torch_private/native.py puts this file where another one includes it.
//
// A first call waits for what is compiled, and <vector>, <algorithm> and <cmath> take longer than all that is here.

// Inductor's flags keep a product and a sum apart: two instructions in place of one.
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = 64;  // bytes

typedef float Register __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(int16_t))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

// Without it GCC reads a value from memory for each of its uses, or adds constants that are to be added one by one.
static inline Register in_register(Register value) {
#ifdef __x86_64__
  asm("" : "+v"(value));
#endif
  return value;
}

static inline Register read(const float* from) { return in_register(*reinterpret_cast<const Unaligned*>(from)); }

static inline float sum_of(Register value) {
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += value[lane];
  return sum;
}

// Lanes of a and b by their numbers, those of b after those of a.
static inline Register chosen(Register a, Register b, Integers lanes) {
#ifdef __clang__
  Register found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = lanes[lane] < LANES ? a[lanes[lane]] : b[lanes[lane] - LANES];
  return found;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// The lanes without a bit, those of b where it is set; the lanes with it, those of a where it is not.
template <int BIT>
static inline Register even(Register a, Register b) {
  Integers lanes;
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane & BIT ? LANES + lane - BIT : lane;
  return chosen(a, b, lanes);
}

template <int BIT>
static inline Register odd(Register a, Register b) {
  Integers lanes;
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane & BIT ? LANES + lane : lane + BIT;
  return chosen(a, b, lanes);
}

// The transpose of a square of registers: of their numbers and those of lanes each bit is exchanged.
template <int BIT>
static inline void turn(Register* rows) {
  for (int i = 0; i < LANES; ++i) {
    if (i & BIT) continue;
    const Register a = rows[i], b = rows[i + BIT];
    rows[i] = even<BIT>(a, b), rows[i + BIT] = odd<BIT>(a, b);
  }
  if constexpr (BIT > 1) turn<BIT / 2>(rows);
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// How many of this size hold so many.
static inline int64_t up(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Memory whose vectors are aligned best, and zeros in such memory.
struct Room {
  float* const values;

  explicit Room(int64_t count) : values(static_cast<float*>(std::aligned_alloc(LINE, bytes_of(count)))) {
    if (!values) std::abort();
  }
  Room(const Room&) = delete;
  ~Room() { std::free(values); }

  static int64_t bytes_of(int64_t count) { return (count * int64_t(sizeof(float)) / LINE + 1) * LINE; }
};

struct Floats : Room {
  explicit Floats(int64_t count) : Room(count) { std::memset(values, 0, bytes_of(count)); }
};
