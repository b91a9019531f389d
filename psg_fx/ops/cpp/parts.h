// Products of float32 by a matrix unit that multiplies numbers of bfloat16 (AMX).
//
// A number of float32 is the sum of three of bfloat16, its parts.  Of the nine products of two numbers' parts six are
// added up, in float32; the other three are at most 2^-23 of the whole (psg_fx/ops/products/in_parts.py).
//
// A tile has 16 rows of 32 numbers: on the left 32 places of 16 rows, on the right 2 places of 16 columns in each of
// its 16 rows.  Which two places lie side by side is free, if it is the same on both sides: here k and k + 16.

#include "registers.h"

typedef uint16_t Part;
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(float))));

constexpr int PARTS = 3;
constexpr int SIDE = 16;    // rows of a tile on the left, columns of one on the right
constexpr int DEPTH = 32;   // places
constexpr int BLOCK = 2 * SIDE;  // rows and columns of what is computed at once
constexpr int64_t TILE = SIDE * DEPTH, STEP = PARTS * TILE;  // numbers of one tile, and of those of all parts
static_assert(LANES == SIDE);

// The unit, as long as a thread uses it.
struct Unit {
  Unit() {
    struct {
      uint8_t palette, start, none[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {1};
    for (int tile = 0; tile < 8; ++tile) config.bytes[tile] = DEPTH * sizeof(Part), config.rows[tile] = SIDE;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  Unit(const Unit&) = delete;
  ~Unit() { asm volatile("tilerelease"); }
};

template <int TILE>
static inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
static inline void load(const Part* from, int64_t bytes_of_row) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(bytes_of_row) : "memory");
}

template <int TILE>
static inline void store(float* to) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(BLOCK * sizeof(float)) : "memory");
}

template <int SUMS, int LEFT, int RIGHT>
static inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// Tiles one after the other, [tiles of rows, steps, parts].
struct InSteps {
  const Part* start;
  int64_t apart;  // from the first to the second of two tiles
  static constexpr int64_t of_row = DEPTH * sizeof(Part);  // bytes

  const Part* at(int64_t step, int part) const { return start + step * STEP + part * TILE; }
};

// Sums of a block in tiles 0 to 3, of one tile or two (TALL, WIDE) on the left, 4 and 5, and on the right, 6 and 7.
template <bool TALL, bool WIDE, typename Left, typename Right>
struct Sums {
  const Left& left;
  const Right& right;
  float* block;  // [BLOCK, BLOCK]

  void load_left(int64_t step, int part) const {
    const Part* from = left.at(step, part);
    load<4>(from, left.of_row);
    if (TALL) load<5>(from + left.apart, left.of_row);
  }

  void load_right(int64_t step, int part) const {
    const Part* from = right.at(step, part);
    load<6>(from, right.of_row);
    if (WIDE) load<7>(from + right.apart, right.of_row);
  }

  void add() const {
    add_product<0, 4, 6>();
    if (WIDE) add_product<1, 4, 7>();
    if (TALL) add_product<2, 5, 6>();
    if (TALL && WIDE) add_product<3, 5, 7>();
  }

  void end() const {
    store<0>(block);
    if (WIDE) store<1>(block + SIDE);
    if (TALL) store<2>(block + SIDE * BLOCK);
    if (TALL && WIDE) store<3>(block + SIDE * BLOCK + SIDE);
  }

  // meanwhile: other work, a piece for every four products, which take the unit 64 cycles.
  template <typename Work>
  void run(int64_t steps, Work& meanwhile) const {
    clear<0>(), clear<1>(), clear<2>(), clear<3>();
    load_left(0, 2), load_right(0, 0);
    for (int64_t k = 0; k < steps; ++k) {
      // Sums of more than thirty products that nothing has read since take 1000 cycles to be stored.
      if (k % 4 == 3) store<0>(block);
      const int64_t next = least(k + 1, steps - 1);
      add(), load_left(k, 1), meanwhile.go_on();
      add(), load_right(k, 1), meanwhile.go_on();
      add(), load_left(k, 0), meanwhile.go_on();
      add(), load_right(k, 0), meanwhile.go_on();
      add(), load_right(k, 2), meanwhile.go_on();
      add(), load_left(next, 2), load_right(next, 0), meanwhile.go_on();
    }
    end();
  }
};

// What a thread does while the unit computes: it writes the last block, two rows at a time, then packs what comes next.
template <typename Writing, typename Packing>
struct Meanwhile {
  Writing writing;
  Packing packing;

  __attribute__((noinline)) void go_on() {
    if (!writing.is_done()) {
      writing.go_on();
      if (!writing.is_done()) writing.go_on();
    } else if (!packing.is_done()) {
      packing.go_on();
    }
  }
};

// So many pieces are multiplied one after the other, each packed while the one before it is; the first one is packed in
// `now` already.
template <typename Writing, typename Packing, typename Pack, typename Multiply>
static void multiply_pieces(int64_t begin, int64_t end, Part*& now, Part*& next, Meanwhile<Writing, Packing>& meanwhile,
                            Pack pack, Multiply multiply) {
  for (int64_t piece = begin; piece < end; ++piece) {
    if (piece + 1 < end) meanwhile.packing = pack(piece + 1, next);
    multiply(piece, now);
    meanwhile.packing.finish();
    Part* const done = now;
    now = next, next = done;
  }
}

// block = left · right, of so many steps; height, width: those of its rows and columns that are wanted.
template <typename Left, typename Right, typename Work>
static void multiply(const Left& left, const Right& right, int64_t steps, int64_t height, int64_t width, float* block,
                     Work& meanwhile) {
  if (height > SIDE && width > SIDE) Sums<true, true, Left, Right>{left, right, block}.run(steps, meanwhile);
  else if (height > SIDE) Sums<true, false, Left, Right>{left, right, block}.run(steps, meanwhile);
  else if (width > SIDE) Sums<false, true, Left, Right>{left, right, block}.run(steps, meanwhile);
  else Sums<false, false, Left, Right>{left, right, block}.run(steps, meanwhile);
}

// The parts of sixteen numbers and of sixteen others, in pairs; what is rounded leaves a rest of either sign.
static inline void split(Register a, Register b, Bits* parts) {
  for (int part = 0; part < PARTS; ++part) {
    const uint32_t half = part < PARTS - 1 ? 0x8000 : 0;
    const Bits upper_a = ((Bits)a + half) & 0xffff0000, upper_b = ((Bits)b + half) & 0xffff0000;
    parts[part] = upper_a >> 16 | upper_b;
    a -= (Register)upper_a, b -= (Register)upper_b;
  }
}

constexpr int32_t NOT_FINITE = 0x7f800000, LEAST = (127 - 100) << 23;  // 2^-100, as bits

// The largest of the numbers that were computed, without their signs, as their bits.
struct Largest {
  Integers bits = {};

  void see(Register value) {
    const Integers without_sign = (Integers)value & 0x7fffffff;
    bits = without_sign > bits ? without_sign : bits;
  }

  // Whether they are in the range in which the parts of numbers, and products of parts, are what they should be.
  bool is_usual() const {
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; ++lane) largest = bits[lane] > largest ? bits[lane] : largest;
    return largest == 0 || (largest >= LEAST && largest < NOT_FINITE);
  }
};

// m[rows, places], as it lies in memory: rows are those of the left, or the columns of the right.
struct Operand {
  const float* start;
  int64_t of_row, of_place, rows, places;
  bool right;

  // Whether the places of a row lie side by side, or are copied so, otherwise the rows of a place do.
  bool is_along() const { return of_place == 1 || of_row != 1; }

  // A step of 16 rows is packed in three pieces of work, or in six, if the tile of each part has to be turned.
  int pieces() const { return right == is_along() ? 2 * PARTS : PARTS; }

  // room: for SIDE * DEPTH numbers, where rows or places are fewer, or neither lie side by side.
  void pack(int piece, int64_t row, int64_t place, Part* to, float* room) const {
    if (piece >= PARTS) return turn_tile(reinterpret_cast<Register*>(to + (piece - PARTS) * TILE));
    const float* from = start + row * of_row + place * of_place;
    const int64_t height = least(SIDE, rows - row), depth = least(DEPTH, places - place);
    const bool along = is_along();
    int64_t apart = along ? of_row : of_place;
    if (height < SIDE || depth < DEPTH || (of_place != 1 && of_row != 1)) {
      if (piece == 0) copy(from, height, depth, room);
      from = room, apart = along ? DEPTH : SIDE;
    }
    for (int k = piece * SIDE / PARTS; k < (piece + 1) * SIDE / PARTS; ++k) {
      Bits parts[PARTS];
      split(read(from + k * apart), read(along ? from + k * apart + SIDE : from + (k + SIDE) * apart), parts);
      for (int part = 0; part < PARTS; ++part) *reinterpret_cast<Bits*>(to + part * TILE + k * DEPTH) = parts[part];
    }
  }

  void copy(const float* from, int64_t height, int64_t depth, float* to) const {
    const int64_t of_i = is_along() ? DEPTH : 1, of_k = is_along() ? 1 : SIDE;
    std::memset(to, 0, TILE * sizeof(float));
    for (int64_t i = 0; i < height; ++i)
      for (int64_t k = 0; k < depth; ++k) to[i * of_i + k * of_k] = from[i * of_row + k * of_place];
  }

  static void turn_tile(Register* tile) {
    Register rows[SIDE];
    for (int k = 0; k < SIDE; ++k) rows[k] = tile[k];
    turn<SIDE / 2>(rows);
    for (int k = 0; k < SIDE; ++k) tile[k] = rows[k];
  }
};

// Memory for tiles of so many steps.
struct Tiles : Room {
  explicit Tiles(int64_t steps) : Room(steps * STEP / 2) {}
  Part* parts() const { return reinterpret_cast<Part*>(values); }
};

// So many rows and places of an operand become tiles, [tiles of rows, steps, parts], piece by piece.
struct Packing {
  const Operand* from = nullptr;
  int64_t row = 0, place = 0, tiles = 0, steps = 0;
  Part* to = nullptr;
  float* room = nullptr;
  int64_t tile = 0;
  int piece = 0;

  Packing() {}
  Packing(const Operand& from, int64_t row, int64_t count, int64_t place, int64_t depth, Part* to, float* room)
      : from(&from), row(row), place(place), tiles(up(count, SIDE)), steps(up(depth, DEPTH)), to(to), room(room) {}

  bool is_done() const { return tile == tiles * steps; }

  void go_on() {
    const int64_t k = tile / tiles, i = tile % tiles;
    from->pack(piece, row + i * SIDE, place + k * DEPTH, to + (i * steps + k) * STEP, room);
    if (++piece == from->pieces()) piece = 0, ++tile;
  }

  void finish() {
    while (!is_done()) go_on();
  }
};
