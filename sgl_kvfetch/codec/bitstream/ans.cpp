// The coder of `ans`: interleaved rANS over rows of integers. docs/format.md says what it reads and writes, and
// ans.py owns the tables. Each row has a class (its scale). Each column, a token, has an energy: how large its integers
// were in the rows before, relative to their rows' scales. Both together choose one of a few distributions. Digits
// refine integers n to 3 n + digit, where a digit is -1, 0 or 1. Its distribution depends on n, too (ladder.py).
//
// rANS: J. Duda, arXiv 1311.2540; interleaved lanes: F. Giesen, arXiv 1402.3392. The states' words are 16 bits.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX512 1
#include <immintrin.h>
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int kLanes = 32;             // of a group: its states
constexpr int kGroup = 128;            // tokens that have states, words and escaped integers of their own
constexpr int kClassLanes = 8;         // that code the rows' classes
constexpr int kWays = 4;               // groups whose steps take turns in one thread
constexpr int kBits = 10;              // of a probability
constexpr uint32_t kLow = 1u << 16;    // states are at least this
constexpr int kClasses = 64;           // of rows
constexpr int kLevels = 32;            // of energy
constexpr int kZero = 128;
constexpr uint32_t kUnit = 1024;       // the energy of a token that is like its row
constexpr uint32_t kMostEnergy = 16384;
constexpr int kFirstLevel = 133 << 2;  // that of 2^6: float32's exponent, and two bits of its mantissa
constexpr int kEscapeFlag = 28;        // in an entry of the decoding table
constexpr int kSymbols = 256;          // besides the escape
constexpr int kCoarse = 4;             // magnitudes of n that a digit's distribution depends on: 0, 1, 2, more

bool has_avx512() {
#ifdef HAS_AVX512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

struct Tables {
    const uint32_t* decode;    // (tables, 1024): symbol | frequency << 8 | offset in the symbol << 18 | escape << 28
    const uint32_t* encode;    // (tables, 256): first slot | frequency << 10 | escape << 28, by integer
    const uint8_t* choice;     // (64, 32): the table for a row's class and a token's level
    const uint16_t* gains;     // (64,): what an integer of 1 in a row of this class adds to the energy
    int delta;                 // the table that codes a row's class, less the class of the row before
    bool has_vectors;          // whether to use the CPU's vectors of 512 bits
    const uint32_t* digits = nullptr;  // (tables, 4): slots of the digit towards zero | of that and of digit 0 << 10

    // The decoding table of a row's class, where energies choose none.
    const uint32_t* of_class(int row_class) const {
        return decode + (static_cast<size_t>(choice[row_class * kLevels]) << kBits);
    }
};

inline int level_of(uint32_t energy) {
    float x = static_cast<float>(energy);
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return std::clamp((bits >> 21) - kFirstLevel, 0, kLevels - 1);
}

inline uint16_t next_energy(uint32_t energy, int n, uint32_t gain) {
    uint32_t size = static_cast<uint32_t>(std::abs(n));
    uint32_t seen = std::min(size * gain, kMostEnergy);
    return static_cast<uint16_t>(energy - (energy >> 5) + (seen >> 5));
}

inline size_t digit_context(int table, int n) { return table * kCoarse + std::min(std::abs(n), kCoarse - 1); }

// ---- transposing

constexpr size_t kTile = 64;  // bytes of a row, and rows, that are transposed together

typedef uint8_t Sixteen __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Sixteen{__VA_ARGS__})
#endif

// Transposes 16 rows of 16 bytes. Four times, each row of the first half is interleaved with one of the second half.
inline void transpose_16(const uint8_t* from, size_t stride, uint8_t* to, size_t to_stride) {
    Sixteen x[16], y[16];
    for (int i = 0; i < 16; ++i) std::memcpy(&x[i], from + i * stride, 16);
    for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 8; ++i) {
            y[2 * i] = SHUFFLE(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            y[2 * i + 1] = SHUFFLE(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::copy(y, y + 16, x);
    }
    for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &x[i], 16);
}

// Writes `columns` rows of `rows` bytes, from `rows` rows of `columns` bytes. Rows begin `stride` and `to_stride` bytes
// apart. Whole lines of the cache are read and written, since a power of two between rows leaves room for few.
void transpose(const uint8_t* from, size_t stride, size_t rows, size_t columns, uint8_t* to, size_t to_stride) {
    for (size_t r = 0; r < rows; r += kTile)
        for (size_t c = 0; c < columns; c += kTile) {
            const size_t height = std::min(kTile, rows - r), width = std::min(kTile, columns - c);
            const uint8_t* tile = from + r * stride + c;
            uint8_t turned[kTile * kTile];
            if (height == kTile && width == kTile) {
                for (size_t i = 0; i < kTile; i += 16)
                    for (size_t k = 0; k < kTile; k += 16)
                        transpose_16(tile + i * stride + k, stride, turned + k * kTile + i, kTile);
            } else {
                for (size_t i = 0; i < height; ++i)
                    for (size_t k = 0; k < width; ++k) turned[k * kTile + i] = tile[i * stride + k];
            }
            for (size_t k = 0; k < width; ++k) std::memcpy(to + (c + k) * to_stride + r, turned + k * kTile, height);
        }
}

// ---- decoding

// Reads a piece: words forwards, escaped integers backwards. Once the two have crossed, they never meet again, so it
// suffices to look at the end, as long as nothing outside the bitstream is read.
struct Reader {
    const uint8_t* next;     // words, forwards
    const uint8_t* escapes;  // escaped integers, backwards: the next one is escapes[-1]
    const uint8_t* begin;    // of the bitstream
    const uint8_t* end;
    bool broken = false;

    // Whether vectors may take `steps` steps. One takes at most 64 bytes, and reads 32 bytes from where it is.
    bool has_room(int steps) const { return end - next >= 64 * steps + 32; }

    uint32_t word() {
        if (end - next < 2) {
            broken = true;
            return 0;
        }
        const uint32_t w = next[0] | next[1] << 8;
        next += 2;
        return w;
    }
    uint8_t escape() {
        if (escapes == begin) {
            broken = true;
            return kZero;
        }
        return *--escapes;
    }
};

// The states of some tokens, or of the classes.
struct Piece {
    uint32_t states[kLanes];
    Reader in;

    // `size`: of the piece, from `data` on. Returns nullptr, or what is wrong.
    const char* open(const uint8_t* data, size_t size, size_t lanes, const uint8_t* begin, const uint8_t* end) {
        if (size < 4 * lanes) return "has a piece that is shorter than its states";
        std::fill(states, states + kLanes, kLow);
        std::memcpy(states, data, 4 * lanes);
        for (uint32_t state : states)
            if (state < kLow) return "has a state that is too small";
        in = {data + 4 * lanes, data + size, begin, end, false};
        return nullptr;
    }

    // Returns nullptr, or what is wrong once all has been decoded.
    const char* close() const {
        if (in.broken || in.next > in.escapes) return "has a piece that ends too early";
        if (in.escapes - in.next > 1 || (in.escapes > in.next && *in.next)) return "has bytes that nothing uses";
        for (uint32_t state : states)
            if (state != kLow) return "does not end where it began";
        return nullptr;
    }
};

inline uint8_t decode_symbol(uint32_t& state, const uint32_t* table, Reader& in) {
    uint32_t entry = table[state & ((1u << kBits) - 1)];
    state = ((entry >> 8) & 1023) * (state >> kBits) + ((entry >> 18) & 1023);
    if (state < kLow) state = state << 16 | in.word();
    return entry >> kEscapeFlag ? in.escape() : static_cast<uint8_t>(entry);
}

void decode_tokens(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t from, size_t tokens,
                   uint8_t* row, Reader& in) {
    const uint8_t* choice = t.choice + row_class * kLevels;
    const uint32_t gain = t.gains[row_class];
    for (size_t i = from; i < tokens; ++i) {
        const uint32_t* table = t.decode + (static_cast<size_t>(choice[level_of(energies[i])]) << kBits);
        row[i] = decode_symbol(states[i % kLanes], table, in);
        energies[i] = next_energy(energies[i], row[i] - kZero, gain);
    }
}

// Decodes the tokens of a row of one table.
void decode_plain(uint32_t* states, const uint32_t* table, size_t from, size_t tokens, uint8_t* row, Reader& in) {
    for (size_t i = from; i < tokens; ++i) row[i] = decode_symbol(states[i % kLanes], table, in);
}

// Decodes a step of a row. It does the same as `decode_tokens`, or as `decode_plain`, but has no branch that depends on a
// state, and has loops that compilers vectorise.
template <bool is_plain>
__attribute__((always_inline)) inline void decode_step(uint32_t* states, const Tables& t, const uint8_t* choice,
                                                       uint32_t gain, uint16_t* energies, uint8_t* row, Reader& in) {
    int32_t levels[kLanes] = {};
    uint32_t flags = 0;
    uint32_t entries[kLanes];
    if (!is_plain)
        for (int lane = 0; lane < kLanes; ++lane) levels[lane] = level_of(energies[lane]);
    const uint8_t* next = in.next;
    for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t* table = t.decode + (static_cast<size_t>(choice[levels[lane]]) << kBits);
        const uint32_t state = states[lane];
        const uint32_t entry = table[state & ((1u << kBits) - 1)];
        const uint32_t moved = (entry >> 8 & 1023) * (state >> kBits) + (entry >> 18 & 1023);
        uint16_t word;
        std::memcpy(&word, next, 2);
        const uint32_t is_low = 0u - (moved < kLow);  // no branch: one in six is, and none can be foreseen
        states[lane] = moved << (16 & is_low) | (word & is_low);
        next += 2 & is_low;
        entries[lane] = entry;
        flags |= entry;
    }
    in.next = next;
    if (flags >> kEscapeFlag)
        for (uint32_t& entry : entries)
            if (entry >> kEscapeFlag) entry = in.escape();
    for (int lane = 0; lane < kLanes; ++lane) row[lane] = static_cast<uint8_t>(entries[lane]);
    if (!is_plain)
        for (int lane = 0; lane < kLanes; ++lane) energies[lane] = next_energy(energies[lane], row[lane] - kZero, gain);
}

// Decodes rows of `count` whole groups, from row `from` on. Returns the row behind, or the first one for which not every
// group has room.
CLONES size_t decode_rows(Piece* pieces, size_t count, const Tables& t, const uint8_t* classes, size_t from,
                          size_t rows, uint16_t* energies, size_t stride, uint8_t* values, bool is_plain) {
    for (size_t r = from; r < rows; ++r) {
        for (size_t k = 0; k < count; ++k)
            if (!pieces[k].in.has_room(kGroup / kLanes)) return r;
        const uint8_t* choice = t.choice + classes[r] * kLevels;
        const uint32_t gain = t.gains[classes[r]];
        for (size_t i = 0; i < count * kGroup; i += kLanes) {
            Piece& piece = pieces[i / kGroup];
            uint8_t* row = values + r * stride + i;
            if (is_plain)
                decode_step<true>(piece.states, t, choice, gain, energies + i, row, piece.in);
            else
                decode_step<false>(piece.states, t, choice, gain, energies + i, row, piece.in);
        }
    }
    return rows;
}

// Decodes whole steps of a row, while there is room for any step. Returns the number of tokens.
CLONES size_t decode_steps(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t tokens,
                           uint8_t* row, Reader& in, bool is_plain) {
    const uint8_t* choice = t.choice + row_class * kLevels;
    const uint32_t gain = t.gains[row_class];
    size_t i = 0;
    for (; i + kLanes <= tokens && in.has_room(1); i += kLanes)
        if (is_plain)
            decode_step<true>(states, t, choice, gain, energies + i, row + i, in);
        else
            decode_step<false>(states, t, choice, gain, energies + i, row + i, in);
    return i;
}

#ifdef HAS_AVX512
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))

AVX512 inline __m512i energies_of(const uint16_t* energies) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(energies)));
}

AVX512 inline __m512i integers_of(const uint8_t* row) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
}

// A row's tables by level, shifted to be offsets of their entries.
struct Choice {
    __m512i low, high;

    AVX512 __m512i at(__m512i energy) const {
        __m512i level = _mm512_srai_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(energy)), 21);
        level = _mm512_sub_epi32(level, _mm512_set1_epi32(kFirstLevel));
        level = _mm512_min_epi32(_mm512_max_epi32(level, _mm512_setzero_si512()), _mm512_set1_epi32(kLevels - 1));
        return _mm512_permutex2var_epi32(low, level, high);
    }
};

AVX512 inline Choice choice_of(const Tables& t, int row_class, int shift) {
    const uint8_t* choice = t.choice + row_class * kLevels;
    return {_mm512_slli_epi32(integers_of(choice), shift), _mm512_slli_epi32(integers_of(choice + 16), shift)};
}

AVX512 inline void move_energies(__m512i n, __m512i energy, __m512i gain, uint16_t* energies) {
    const __m512i size = _mm512_abs_epi32(n);
    const __m512i seen = _mm512_min_epi32(_mm512_mullo_epi32(size, gain), _mm512_set1_epi32(kMostEnergy));
    energy = _mm512_add_epi32(_mm512_sub_epi32(energy, _mm512_srli_epi32(energy, 5)), _mm512_srli_epi32(seen, 5));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(energies), _mm512_cvtepi32_epi16(energy));
}

// Refills each state that is too small with a word.
AVX512 inline __m512i filled_16(__m512i state, const uint8_t*& next) {
    const __mmask16 low = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(kLow));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    const __m512i filled = _mm512_or_si512(_mm512_slli_epi32(state, 16), _mm512_maskz_expand_epi32(low, words));
    next += 2 * _mm_popcnt_u32(low);
    return _mm512_mask_mov_epi32(state, low, filled);
}

// Returns the entries with the escaped integers, which are read in the order of the lanes.
AVX512 inline __m512i with_escapes(__m512i entry, __mmask16 escaped, Reader& in) {
    alignas(64) uint32_t each[16];
    _mm512_store_si512(each, entry);
    for (uint32_t left = escaped; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        each[lane] = in.escape();
    }
    return _mm512_load_si512(each);
}

// What all tokens of a row have in common. `shift`: of a table's number.
struct Row {
    const Tables& t;
    const Choice choice;
    const __m512i gain;

    AVX512 Row(const Tables& t, int row_class, int shift)
        : t(t), choice(choice_of(t, row_class, shift)), gain(_mm512_set1_epi32(t.gains[row_class])) {}
};

// Decodes the integers of 16 lanes with these tables, and writes them into the row. Returns them.
AVX512 inline __m512i decode_16(__m512i& state, const uint32_t* tables, __m512i table, uint8_t* row, Reader& in) {
    const __m512i low_bits = _mm512_set1_epi32((1 << kBits) - 1), slot = _mm512_and_si512(state, low_bits);
    __m512i entry = _mm512_i32gather_epi32(_mm512_add_epi32(table, slot), tables, 4);
    const __m512i count = _mm512_and_si512(_mm512_srli_epi32(entry, 8), low_bits);
    const __m512i offset = _mm512_and_si512(_mm512_srli_epi32(entry, 18), low_bits);
    state = _mm512_add_epi32(_mm512_mullo_epi32(count, _mm512_srli_epi32(state, kBits)), offset);
    state = filled_16(state, in.next);
    const __mmask16 escaped = _mm512_test_epi32_mask(entry, _mm512_set1_epi32(1 << kEscapeFlag));
    if (__builtin_expect(escaped, 0)) entry = with_escapes(entry, escaped, in);
    const __m512i integer = _mm512_and_si512(entry, _mm512_set1_epi32(255));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row), _mm512_cvtepi32_epi8(integer));
    return integer;
}

#endif

// What rows hold, and how they are decoded: integers, whose tables energies choose, or each row's class if `is_plain`.
// `step` decodes 16 lanes.
template <bool is_plain>
struct Integers {
    using Value = uint8_t;

    static size_t rows(Piece* pieces, const Tables& t, const uint8_t* classes, size_t from, size_t rows,
                       uint16_t* energies, size_t stride, uint8_t* values) {
        return decode_rows(pieces, kWays, t, classes, from, rows, energies, stride, values, is_plain);
    }
    static void row(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t from, size_t tokens,
                    uint8_t* row, Reader& in) {
        if (!from) from = decode_steps(states, t, row_class, energies, tokens, row, in, is_plain);
        if (is_plain)
            decode_plain(states, t.of_class(row_class), from, tokens, row, in);
        else
            decode_tokens(states, t, row_class, energies, from, tokens, row, in);
    }
#ifdef HAS_AVX512
    AVX512 static inline auto of(const Tables& t, int row_class) {
        if constexpr (is_plain)
            return t.of_class(row_class);
        else
            return Row(t, row_class, kBits);
    }
    template <class Of>
    AVX512 static inline void step(__m512i& state, const Of& of, uint16_t* energies, uint8_t* row, Reader& in) {
        if constexpr (is_plain) {
            decode_16(state, of, _mm512_setzero_si512(), row, in);
        } else {
            const __m512i energy = energies_of(energies);
            const __m512i integer = decode_16(state, of.t.decode, of.choice.at(energy), row, in);
            move_energies(_mm512_sub_epi32(integer, _mm512_set1_epi32(kZero)), energy, of.gain, energies);
        }
    }
#endif
};

#ifdef HAS_AVX512
// Decodes whole steps of a row, while there is room for any step. Returns the number of tokens.
template <class Coded>
AVX512 size_t read_steps_avx512(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t tokens,
                                typename Coded::Value* row, Reader& in) {
    const auto of = Coded::of(t, row_class);
    __m512i a = _mm512_loadu_si512(states), b = _mm512_loadu_si512(states + 16);
    size_t i = 0;
    for (; i + kLanes <= tokens && in.has_room(1); i += kLanes) {
        Coded::step(a, of, energies + i, row + i, in);
        Coded::step(b, of, energies + i + 16, row + i + 16, in);
    }
    _mm512_storeu_si512(states, a);
    _mm512_storeu_si512(states + 16, b);
    return i;
}

// Decodes a row of `kWays` whole groups. A step waits for the one before in the same group, so the groups take turns.
// Returns the row behind, or the first one for which not every group has room.
template <class Coded>
AVX512 size_t read_ways_avx512(Piece* pieces, const Tables& t, const uint8_t* classes, size_t from, size_t rows,
                               uint16_t* energies, size_t stride, typename Coded::Value* values) {
    __m512i states[2 * kWays];
    Reader in[kWays];
#pragma GCC unroll 8
    for (int k = 0; k < kWays; ++k) {
        states[2 * k] = _mm512_loadu_si512(pieces[k].states);
        states[2 * k + 1] = _mm512_loadu_si512(pieces[k].states + 16);
        in[k] = pieces[k].in;
    }
    size_t r = from;
    for (; r < rows; ++r) {
        bool has_room = true;
#pragma GCC unroll 8
        for (int k = 0; k < kWays; ++k) has_room &= in[k].has_room(kGroup / kLanes);
        if (!has_room) break;
        const auto of = Coded::of(t, classes[r]);
        typename Coded::Value* row = values + r * stride;
        for (int i = 0; i < kGroup; i += kLanes) {
#pragma GCC unroll 8
            for (int k = 0; k < kWays; ++k) {
                const int token = k * kGroup + i;
                Coded::step(states[2 * k], of, energies + token, row + token, in[k]);
                Coded::step(states[2 * k + 1], of, energies + token + 16, row + token + 16, in[k]);
            }
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kWays; ++k) {
        _mm512_storeu_si512(pieces[k].states, states[2 * k]);
        _mm512_storeu_si512(pieces[k].states + 16, states[2 * k + 1]);
        pieces[k].in = in[k];
    }
    return r;
}
#endif

// Refines the integers of a row from `from` on.
void refine_tokens(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t from, size_t tokens,
                   int16_t* row, Reader& in) {
    const uint8_t* choice = t.choice + row_class * kLevels;
    const uint32_t gain = t.gains[row_class];
    for (size_t i = from; i < tokens; ++i) {
        const int n = row[i];
        const uint32_t entry = t.digits[digit_context(choice[level_of(energies[i])], n)];
        const uint32_t inner = entry & 1023, outer = entry >> 10;
        uint32_t& state = states[i % kLanes];
        const uint32_t slot = state & ((1u << kBits) - 1);
        const bool has_middle = slot >= inner, is_outer = slot >= outer;
        const uint32_t first = is_outer ? outer : has_middle ? inner : 0;
        const uint32_t end = is_outer ? 1u << kBits : has_middle ? outer : inner;
        state = (end - first) * (state >> kBits) + slot - first;
        if (state < kLow) state = state << 16 | in.word();
        const int digit = has_middle + is_outer - 1;
        row[i] = static_cast<int16_t>(3 * n + (n < 0 ? -digit : digit));
        energies[i] = next_energy(energies[i], row[i], gain);
    }
}

#ifdef HAS_AVX512
AVX512 inline __m512i shorts_of(const int16_t* row) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
}

#endif

// Integers that are refined.
struct Digits {
    using Value = int16_t;

    static size_t rows(Piece*, const Tables&, const uint8_t*, size_t from, size_t, uint16_t*, size_t, int16_t*) {
        return from;
    }
    static void row(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t from, size_t tokens,
                    int16_t* row, Reader& in) {
        refine_tokens(states, t, row_class, energies, from, tokens, row, in);
    }
#ifdef HAS_AVX512
    AVX512 static inline Row of(const Tables& t, int row_class) { return {t, row_class, 2}; }
    AVX512 static inline void step(__m512i& state, const Row& of, uint16_t* energies, int16_t* row, Reader& in) {
        const __m512i n = shorts_of(row), energy = energies_of(energies), low_bits = _mm512_set1_epi32(1023);
        const __m512i size = _mm512_min_epi32(_mm512_abs_epi32(n), _mm512_set1_epi32(kCoarse - 1));
        const __m512i index = _mm512_add_epi32(of.choice.at(energy), size);
        const __m512i entry = _mm512_i32gather_epi32(index, of.t.digits, 4);
        const __m512i inner = _mm512_and_si512(entry, low_bits), outer = _mm512_srli_epi32(entry, 10);
        const __m512i slot = _mm512_and_si512(state, low_bits);
        const __mmask16 middle = _mm512_cmpge_epi32_mask(slot, inner), last = _mm512_cmpge_epi32_mask(slot, outer);
        const __m512i first = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(middle, inner), last, outer);
        __m512i end = _mm512_mask_mov_epi32(inner, middle, outer);
        end = _mm512_mask_mov_epi32(end, last, _mm512_set1_epi32(1 << kBits));
        state = _mm512_mullo_epi32(_mm512_sub_epi32(end, first), _mm512_srli_epi32(state, kBits));
        state = filled_16(_mm512_add_epi32(state, _mm512_sub_epi32(slot, first)), in.next);
        const __m512i one = _mm512_set1_epi32(1), none = _mm512_setzero_si512();
        const __m512i inner_digit = _mm512_maskz_mov_epi32(_knot_mask16(middle), one);
        __m512i digit = _mm512_mask_sub_epi32(one, _knot_mask16(last), none, inner_digit);
        digit = _mm512_mask_sub_epi32(digit, _mm512_cmplt_epi32_mask(n, none), none, digit);
        const __m512i fine = _mm512_add_epi32(_mm512_add_epi32(n, _mm512_slli_epi32(n, 1)), digit);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_cvtepi32_epi16(fine));
        move_energies(fine, energy, of.gain, energies);
    }
#endif
};

template <class Coded>
void read_row(uint32_t* states, const Tables& t, int row_class, uint16_t* energies, size_t tokens,
              typename Coded::Value* row, Reader& in) {
    size_t done = 0;
#ifdef HAS_AVX512
    if (t.has_vectors) done = read_steps_avx512<Coded>(states, t, row_class, energies, tokens, row, in);
#endif
    Coded::row(states, t, row_class, energies, done, tokens, row, in);
}

// Decodes rows of `kWays` whole groups. Returns the row behind, or the first one for which not every group has room.
template <class Coded>
size_t read_groups(Piece* pieces, const Tables& t, const uint8_t* classes, size_t from, size_t rows, uint16_t* energies,
                   size_t stride, typename Coded::Value* values) {
#ifdef HAS_AVX512
    if (t.has_vectors) return read_ways_avx512<Coded>(pieces, t, classes, from, rows, energies, stride, values);
#endif
    return Coded::rows(pieces, t, classes, from, rows, energies, stride, values);
}

// Returns the classes of all rows.
std::vector<uint8_t> read_classes(Piece& piece, const Tables& t, size_t rows) {
    const uint32_t* deltas = t.decode + (static_cast<size_t>(t.delta) << kBits);
    std::vector<uint8_t> classes(rows);
    int row_class = 0;
    for (size_t r = 0; r < rows; ++r) {
        row_class = (row_class + decode_symbol(piece.states[r % kClassLanes], deltas, piece.in) - kZero) & (kClasses - 1);
        classes[r] = static_cast<uint8_t>(row_class);
    }
    return classes;
}

// A bitstream whose parts were found: the pieces of the groups, and the class of each row.
struct Opened {
    std::vector<Piece> pieces;
    std::vector<uint8_t> classes;

    // Returns nullptr, or what is wrong.
    const char* open(const Tables& t, const uint8_t* data, size_t size, size_t rows, size_t tokens) {
        const size_t groups = (tokens + kGroup - 1) / kGroup, header = 4 * groups;
        if (size < header) return "is shorter than the sizes of its groups";
        if (size % 2) return "ends within a word";
        pieces.resize(groups);
        size_t start = header;
        for (size_t g = 0; g < groups; ++g) {
            uint32_t words;
            std::memcpy(&words, data + 4 * g, 4);
            if (words > (size - start) / 2) return "is shorter than its groups";
            const size_t lanes = std::min<size_t>(kLanes, tokens - g * kGroup);
            const char* fault = pieces[g].open(data + start, 2 * size_t{words}, lanes, data, data + size);
            if (fault) return fault;
            start += 2 * size_t{words};
        }
        Piece coded_classes;
        const size_t class_lanes = std::min<size_t>(kClassLanes, rows);
        const char* fault = coded_classes.open(data + start, size - start, class_lanes, data, data + size);
        if (fault) return fault;
        classes = read_classes(coded_classes, t, rows);
        return coded_classes.close();
    }
};

// How many groups take turns from this token on.
size_t groups_from(size_t token, size_t tokens) { return token + kWays * kGroup <= tokens ? kWays : 1; }

// Decodes, or refines, some rows of groups that take turns, of `tokens` tokens together.
template <class Coded>
void read_rows(Piece* pieces, const Tables& t, const uint8_t* classes, size_t rows, uint16_t* energies, size_t tokens,
               size_t stride, typename Coded::Value* values) {
    for (size_t r = 0; r < rows; ++r) {
        if (tokens == kWays * kGroup) r = read_groups<Coded>(pieces, t, classes, r, rows, energies, stride, values);
        if (r == rows) break;
        for (size_t from = 0; from < tokens; from += kGroup) {
            Piece& piece = pieces[from / kGroup];
            const size_t length = std::min<size_t>(kGroup, tokens - from);
            typename Coded::Value* row = values + r * stride + from;
            read_row<Coded>(piece.states, t, classes[r], energies + from, length, row, piece.in);
        }
    }
}

// Decodes, or refines, rows of integers. Returns nullptr, or what is wrong.
template <class Coded>
const char* read(const Tables& t, const uint8_t* data, size_t size, size_t rows, size_t tokens,
                 typename Coded::Value* values) {
    Opened in;
    if (const char* fault = in.open(t, data, size, rows, tokens)) return fault;
    std::vector<uint16_t> energies(tokens, kUnit);
    for (size_t first = 0; first < tokens;) {
        const size_t count = groups_from(first, tokens), length = std::min(count * kGroup, tokens - first);
        Piece* pieces = &in.pieces[first / kGroup];
        read_rows<Coded>(pieces, t, in.classes.data(), rows, &energies[first], length, tokens, values + first);
        for (size_t k = 0; k < count; ++k)
            if (const char* fault = pieces[k].close()) return fault;
        first += length;
    }
    return nullptr;
}

// Distributions of the rows' own, and one that codes the rows' classes. Class c has distribution c, a larger one the
// last, whatever a token's energy.
struct OwnTables {
    std::vector<uint32_t> decode;
    std::vector<uint8_t> choice;
    const uint16_t unused[kClasses] = {};  // gains

    // `slots`: of each of `count` distributions, each adding up to 1,024, with some of the escape.
    OwnTables(const Tables& t, const uint16_t* slots, size_t count)
        : decode((count + 1) << kBits), choice(kClasses * kLevels) {
        for (size_t d = 0; d < count; ++d, slots += kSymbols + 1) {
            uint32_t* next = &decode[d << kBits];
            for (uint32_t s = 0; s <= kSymbols; ++s)
                for (uint32_t offset = 0; offset < slots[s]; ++offset)
                    *next++ = (s & 255) | uint32_t{slots[s]} << 8 | offset << 18 | (s >> 8) << kEscapeFlag;
        }
        std::copy_n(t.decode + (static_cast<size_t>(t.delta) << kBits), 1u << kBits, &decode[count << kBits]);
        for (size_t c = 0; c < kClasses; ++c)
            std::fill_n(&choice[c * kLevels], kLevels, static_cast<uint8_t>(std::min(c, count - 1)));
    }

    static bool are_sound(const uint16_t* slots, size_t count) {
        for (size_t d = 0; d < count; ++d, slots += kSymbols + 1)
            if (!slots[kSymbols] || std::accumulate(slots, slots + kSymbols + 1, 0u) != 1u << kBits) return false;
        return true;
    }

    Tables tables(const Tables& t) const {
        const int delta = static_cast<int>(decode.size() >> kBits) - 1;
        return {decode.data(), nullptr, choice.data(), unused, delta, t.has_vectors};
    }
};

// Decodes rows of one table each, and writes their tokens one after another: `frames` is (tokens, rows).
const char* read_frames(const Tables& t, const uint8_t* data, size_t size, size_t rows, size_t tokens,
                        uint8_t* frames) {
    Opened in;
    if (const char* fault = in.open(t, data, size, rows, tokens)) return fault;
    uint8_t some[kTile * kWays * kGroup];
    uint16_t unused[kWays * kGroup];  // energies
    for (size_t first = 0; first < tokens;) {
        const size_t count = groups_from(first, tokens), length = std::min(count * kGroup, tokens - first);
        Piece* pieces = &in.pieces[first / kGroup];
        for (size_t r = 0; r < rows; r += kTile) {
            const size_t now = std::min<size_t>(kTile, rows - r);
            read_rows<Integers<true>>(pieces, t, &in.classes[r], now, unused, length, length, some);
            transpose(some, length, now, length, frames + first * rows + r, rows);
        }
        for (size_t k = 0; k < count; ++k)
            if (const char* fault = pieces[k].close()) return fault;
        first += length;
    }
    return nullptr;
}

// ---- encoding

constexpr size_t kSpare = 32;  // bytes in front of a piece's room, which a word or a vector may overwrite

// Room for words, a few MiB. A thread keeps it for its next bitstream: the kernel clears fresh pages, which took a tenth
// of the time of encoding.
thread_local std::vector<uint8_t> words_of_thread;

// A piece that is written from its end to its beginning, as rANS encodes.
struct Writer {
    uint32_t states[kLanes];
    size_t lanes;
    uint8_t *next, *end;           // words; the room in front of them is enough, a word for each symbol
    std::vector<uint8_t> escapes;  // the last one first

    Writer(size_t lanes, uint8_t* end) : lanes(lanes), next(end), end(end) { std::fill(states, states + kLanes, kLow); }

    size_t words() const { return (4 * lanes + (end - next) + escapes.size() + 1) / 2; }

    // Writes the piece. Returns where it ends.
    uint8_t* write(uint8_t* to) const {
        uint8_t* const behind = to + 2 * words();
        std::memcpy(to, states, 4 * lanes);
        std::memcpy(to + 4 * lanes, next, end - next);
        if (escapes.size() % 2) to[4 * lanes + (end - next)] = 0;
        std::copy(escapes.begin(), escapes.end(), behind - escapes.size());
        return behind;
    }
};

inline void encode_symbol(uint32_t& state, const uint32_t* table, uint8_t integer, Writer& out) {
    const uint32_t entry = table[integer], count = entry >> 10 & 1023;
    if (entry >> kEscapeFlag) out.escapes.push_back(integer);
    const uint32_t is_full = 0u - (state >= count << (32 - kBits));  // no branch, as in `decode_step`
    out.next[-1] = static_cast<uint8_t>(state >> 8);  // overwritten by the next word, unless it is one
    out.next[-2] = static_cast<uint8_t>(state);
    out.next -= 2 & is_full;
    state >>= 16 & is_full;
    state = (state / count << kBits) + state % count + (entry & 1023);
}

// Encodes the tokens of a group's row from `from` on. `entries`: as in `Tables::encode`.
void encode_tokens(Writer& out, const uint32_t* entries, const uint8_t* row, const uint8_t* chosen, size_t from,
                   size_t tokens) {
    for (size_t i = tokens; i-- > from;)
        encode_symbol(out.states[i % kLanes], entries + (static_cast<size_t>(chosen[i]) << 8), row[i], out);
}

// Returns the sum of the magnitudes of a row's integers.
CLONES uint64_t sum_of_sizes(const uint8_t* row, size_t tokens) {
    uint32_t sum = 0;  // at most 2^22 tokens
    for (size_t i = 0; i < tokens; ++i) sum += static_cast<uint32_t>(std::abs(row[i] - kZero));
    return sum;
}

uint64_t sum_of_sizes(const int16_t* row, size_t tokens) {
    uint64_t sum = 0;
    for (size_t i = 0; i < tokens; ++i) sum += static_cast<uint64_t>(std::abs(static_cast<int>(row[i])));
    return sum;
}

template <class T>
uint8_t class_of(const T* row, size_t tokens) {
    const double mean = static_cast<double>(sum_of_sizes(row, tokens)) / static_cast<double>(tokens);
    return static_cast<uint8_t>(
        std::clamp(static_cast<int>(std::lround(4 * std::log2(mean + 1.0 / 64))) + 24, 0, kClasses - 1));
}

// Chooses the table of each token of a row, and updates the energies.
void choose_tables(const Tables& t, int row_class, const uint8_t* row, size_t from, size_t tokens, uint16_t* energies,
                   uint8_t* chosen) {
    const uint8_t* choice = t.choice + row_class * kLevels;
    const uint32_t gain = t.gains[row_class];
    for (size_t i = from; i < tokens; ++i) {
        chosen[i] = choice[level_of(energies[i])];
        energies[i] = next_energy(energies[i], row[i] - kZero, gain);
    }
}

// The entries of a table whose integers, but for the escaped ones, are neighbours.
struct Near {
    static constexpr int kCount = 32;
    alignas(64) uint32_t entries[kCount];  // of the integers from `lowest` on
    uint32_t escape;                       // of all others
    int lowest;

    // Returns whether the table is one. `table`: as in `Tables::encode`, where some integer is escaped.
    bool take(const uint32_t* table) {
        int first = 256, last = -1;
        for (int i = 0; i < 256; ++i)
            if (table[i] >> kEscapeFlag)
                escape = table[i];
            else
                first = std::min(first, i), last = i;
        lowest = std::min(first, 256 - kCount);
        std::copy(table + lowest, table + lowest + kCount, entries);
        return last - lowest < kCount;
    }
};

#ifdef HAS_AVX512
AVX512 void choose_tables_avx512(const Tables& t, int row_class, const uint8_t* row, size_t tokens, uint16_t* energies,
                                 uint8_t* chosen) {
    const Choice choice = choice_of(t, row_class, 0);
    const __m512i gain = _mm512_set1_epi32(t.gains[row_class]);
    size_t i = 0;
    for (; i + 16 <= tokens; i += 16) {
        const __m512i energy = energies_of(energies + i);
        const __m512i table = choice.at(energy);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(chosen + i), _mm512_cvtepi32_epi8(table));
        move_energies(_mm512_sub_epi32(integers_of(row + i), _mm512_set1_epi32(kZero)), energy, gain, energies + i);
    }
    choose_tables(t, row_class, row, i, tokens, energies, chosen);
}

// Encodes a step of 16 lanes, whose integers have these entries.
AVX512 inline void encode_16(__m512i& state, __m512i entry, __m512 inverse, const uint8_t* row, uint8_t*& next,
                             std::vector<uint8_t>& escapes) {
    const __m512i count = _mm512_and_si512(_mm512_srli_epi32(entry, 10), _mm512_set1_epi32(1023));
    const __mmask16 escaped = _mm512_test_epi32_mask(entry, _mm512_set1_epi32(1 << kEscapeFlag));
    if (__builtin_expect(escaped, 0))
        for (int lane = 16; lane-- > 0;)
            if (escaped >> lane & 1) escapes.push_back(row[lane]);
    const __mmask16 full = _mm512_cmpge_epu32_mask(state, _mm512_slli_epi32(count, 32 - kBits));
    // Words lie in front of those before them. What is stored in front of the words is overwritten by the next ones.
    const unsigned words = _mm_popcnt_u32(full);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i last = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(words)));
    const __m512i moved = _mm512_permutexvar_epi32(last, _mm512_maskz_compress_epi32(full, state));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next - kSpare), _mm512_cvtepi32_epi16(moved));
    next -= 2 * words;
    state = _mm512_mask_srli_epi32(state, full, state, 16);
    // The quotient is below 2^22, so the one computed in float32 is at most 1 too large or too small.
    __m512i quotient = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(state), inverse));
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, count));
    const __mmask16 over = _mm512_cmplt_epi32_mask(rest, _mm512_setzero_si512());
    quotient = _mm512_mask_sub_epi32(quotient, over, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_add_epi32(rest, over, rest, count);
    const __mmask16 under = _mm512_cmpge_epi32_mask(rest, count);
    quotient = _mm512_mask_add_epi32(quotient, under, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_sub_epi32(rest, under, rest, count);
    const __m512i first = _mm512_and_si512(entry, _mm512_set1_epi32(1023));
    state = _mm512_add_epi32(_mm512_slli_epi32(quotient, kBits), _mm512_add_epi32(rest, first));
}

// The entries of tokens that have any tables.
struct AnyEntries {
    const uint32_t* entries;
    const uint8_t* chosen;

    AVX512 void encode(__m512i& state, const uint8_t* row, size_t token, uint8_t*& next,
                       std::vector<uint8_t>& escapes) const {
        const __m512i index = _mm512_add_epi32(_mm512_slli_epi32(integers_of(chosen + token), 8), integers_of(row + token));
        const __m512i entry = _mm512_i32gather_epi32(index, entries, 4);
        const __m512i count = _mm512_and_si512(_mm512_srli_epi32(entry, 10), _mm512_set1_epi32(1023));
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), _mm512_cvtepi32_ps(count));
        encode_16(state, entry, inverse, row + token, next, escapes);
    }
};

// The entries of a row of one table, in registers: all but the escape's are those of 32 neighbouring integers.
struct NearEntries {
    __m512i low, high, escape, lowest;
    __m512 low_inverse, high_inverse, escape_inverse;

    AVX512 explicit NearEntries(const Near& near)
        : low(_mm512_load_si512(near.entries)),
          high(_mm512_load_si512(near.entries + 16)),
          escape(_mm512_set1_epi32(static_cast<int>(near.escape))),
          lowest(_mm512_set1_epi32(near.lowest)),
          low_inverse(inverse_of(low)),
          high_inverse(inverse_of(high)),
          escape_inverse(inverse_of(escape)) {}

    AVX512 static __m512 inverse_of(__m512i entry) {
        const __m512i count = _mm512_and_si512(_mm512_srli_epi32(entry, 10), _mm512_set1_epi32(1023));
        return _mm512_div_ps(_mm512_set1_ps(1), _mm512_cvtepi32_ps(count));
    }

    AVX512 void encode(__m512i& state, const uint8_t* row, size_t token, uint8_t*& next,
                       std::vector<uint8_t>& escapes) const {
        const __m512i index = _mm512_sub_epi32(integers_of(row + token), lowest);
        const __mmask16 is_near = _mm512_cmplt_epu32_mask(index, _mm512_set1_epi32(Near::kCount));
        const __m512i entry = _mm512_mask_mov_epi32(escape, is_near, _mm512_permutex2var_epi32(low, index, high));
        const __m512 inverse =
            _mm512_mask_mov_ps(escape_inverse, is_near, _mm512_permutex2var_ps(low_inverse, index, high_inverse));
        encode_16(state, entry, inverse, row + token, next, escapes);
    }
};

// Encodes the first `tokens` tokens, whole steps, of a row of `ways` groups, which take turns.
template <int ways, class Entries>
AVX512 void encode_ways_avx512(Writer* writers, const Entries& entries, const uint8_t* row, size_t tokens) {
    __m512i states[2 * ways];
    uint8_t* next[ways];
#pragma GCC unroll 8
    for (int k = 0; k < ways; ++k) {
        states[2 * k] = _mm512_loadu_si512(writers[k].states);
        states[2 * k + 1] = _mm512_loadu_si512(writers[k].states + 16);
        next[k] = writers[k].next;
    }
    for (size_t i = tokens; i > 0; i -= kLanes)
#pragma GCC unroll 8
        for (int k = 0; k < ways; ++k) {
            const size_t token = k * kGroup + i;
            entries.encode(states[2 * k + 1], row, token - 16, next[k], writers[k].escapes);
            entries.encode(states[2 * k], row, token - kLanes, next[k], writers[k].escapes);
        }
#pragma GCC unroll 8
    for (int k = 0; k < ways; ++k) {
        _mm512_storeu_si512(writers[k].states, states[2 * k]);
        _mm512_storeu_si512(writers[k].states + 16, states[2 * k + 1]);
        writers[k].next = next[k];
    }
}
#endif

// The table of each symbol, and the class of each row. A row of one table has the number of its class.
struct Plan {
    size_t rows, tokens;
    std::vector<uint8_t> chosen;  // empty if each row has one table
    std::vector<uint8_t> classes;
    std::vector<Near> near;  // each table, if each row has one and all are such

    Plan(size_t rows, size_t tokens, bool has_row_tables = false)
        : rows(rows), tokens(tokens), chosen(has_row_tables ? 0 : rows * tokens), classes(rows) {}
};

// Encodes the rows of `count` groups, which begin at the token `first`, the last row first. `row_of(r, first, tokens)`
// returns the symbols of a row.
template <class RowOf>
void write_groups(const Tables& t, const uint32_t* entries, const Plan& plan, RowOf& row_of, size_t first,
                  size_t count, Writer* writers) {
    const size_t tokens = std::min(count * kGroup, plan.tokens - first);
    std::vector<uint8_t> same(plan.chosen.empty() ? tokens : 0);
    for (size_t r = plan.rows; r-- > 0;) {
        const uint8_t *row = row_of(r, first, tokens), *chosen = same.data();
#ifdef HAS_AVX512
        if (t.has_vectors && tokens == kWays * kGroup && !plan.near.empty()) {
            encode_ways_avx512<kWays>(writers, NearEntries(plan.near[plan.classes[r]]), row, kGroup);
            continue;
        }
#endif
        if (same.empty())
            chosen = &plan.chosen[r * plan.tokens + first];
        else
            std::fill(same.begin(), same.end(), plan.classes[r]);
#ifdef HAS_AVX512
        if (t.has_vectors && tokens == kWays * kGroup) {
            encode_ways_avx512<kWays>(writers, AnyEntries{entries, chosen}, row, kGroup);
            continue;
        }
        if (t.has_vectors) {
            const size_t whole = tokens / kLanes * kLanes;
            encode_tokens(*writers, entries, row, chosen, whole, tokens);
            encode_ways_avx512<1>(writers, AnyEntries{entries, chosen}, row, whole);
            continue;
        }
#endif
        for (size_t k = 0; k < count; ++k) {
            const size_t from = k * kGroup;
            encode_tokens(writers[k], entries, row + from, chosen + from, 0, std::min<size_t>(kGroup, tokens - from));
        }
    }
}

// Returns the bitstream. `row_of`: as in `write_groups`.
template <class RowOf>
std::vector<uint8_t> write(const Tables& t, const uint32_t* entries, const Plan& plan, RowOf row_of) {
    const size_t groups = (plan.tokens + kGroup - 1) / kGroup, most = std::min<size_t>(plan.tokens, kWays * kGroup);
    // Groups that take turns use the room of those before them.
    std::vector<uint8_t>& words = words_of_thread;
    words.resize(std::max(words.size(), 2 * plan.rows * most + kSpare * (kWays + 1)));
    std::vector<uint8_t> coded(4 * groups);
    coded.reserve(4 * groups + plan.rows * plan.tokens / 2);  // of exponents; more is taken as it is needed
    const auto append = [&](const Writer& writer) {
        const size_t begin = coded.size();
        coded.resize(begin + 2 * writer.words());
        writer.write(&coded[begin]);
    };
    for (size_t first = 0; first < plan.tokens;) {
        const size_t count = groups_from(first, plan.tokens), length = std::min(count * kGroup, plan.tokens - first);
        std::vector<Writer> writers;
        uint8_t* room = words.data();
        for (size_t from = 0; from < length; from += kGroup) {
            const size_t tokens = std::min<size_t>(kGroup, length - from);
            writers.emplace_back(std::min<size_t>(kLanes, tokens), room += kSpare + 2 * plan.rows * tokens);
        }
        write_groups(t, entries, plan, row_of, first, count, writers.data());
        for (size_t k = 0; k < count; ++k) {
            const uint32_t size = static_cast<uint32_t>(writers[k].words());
            std::memcpy(&coded[4 * (first / kGroup + k)], &size, 4);
            append(writers[k]);
        }
        first += length;
    }
    std::vector<uint8_t> of_classes(kSpare + 2 * plan.rows);
    Writer classes(std::min<size_t>(kClassLanes, plan.rows), of_classes.data() + of_classes.size());
    const uint32_t* deltas = t.encode + (static_cast<size_t>(t.delta) << 8);
    for (size_t r = plan.rows; r-- > 0;) {
        const int delta = plan.classes[r] - (r ? plan.classes[r - 1] : 0);
        encode_symbol(classes.states[r % kClassLanes], deltas, static_cast<uint8_t>(delta + kZero), classes);
    }
    append(classes);
    return coded;
}

// Returns the bitstream of symbols, (rows, tokens).
std::vector<uint8_t> write_rows(const Tables& t, const uint32_t* entries, const Plan& plan, const uint8_t* symbols) {
    return write(t, entries, plan, [&](size_t r, size_t first, size_t) { return symbols + r * plan.tokens + first; });
}

std::vector<uint8_t> encode(const Tables& t, const uint8_t* values, size_t rows, size_t tokens) {
    Plan plan(rows, tokens);
    std::vector<uint16_t> energies(tokens, kUnit);
    for (size_t r = 0; r < rows; ++r) {
        const uint8_t* row = values + r * tokens;
        const int row_class = plan.classes[r] = class_of(row, tokens);
#ifdef HAS_AVX512
        if (t.has_vectors)
            choose_tables_avx512(t, row_class, row, tokens, energies.data(), &plan.chosen[r * tokens]);
        else
#endif
            choose_tables(t, row_class, row, 0, tokens, energies.data(), &plan.chosen[r * tokens]);
    }
    return write_rows(t, t.encode, plan, values);
}

// Returns the bitstream of the digits that refine a third of each integer, rounded, to the integer.
std::vector<uint8_t> encode_digits(const Tables& t, int num_tables, const int16_t* values, size_t rows, size_t tokens) {
    std::vector<uint32_t> entries(static_cast<size_t>(num_tables) * kCoarse << 8);
    for (int i = 0; i < num_tables * kCoarse; ++i) {
        const uint32_t inner = t.digits[i] & 1023, outer = t.digits[i] >> 10;
        const uint32_t first[] = {0, inner, outer, 1u << kBits};
        for (int d = 0; d < 3; ++d) entries[i * 256 + d] = first[d] | (first[d + 1] - first[d]) << 10;
    }
    Plan plan(rows, tokens);
    std::vector<uint8_t> symbols(rows * tokens);
    std::vector<uint16_t> energies(tokens, kUnit);
    for (size_t r = 0; r < rows; ++r) {
        const int16_t* row = values + r * tokens;
        const int row_class = plan.classes[r] = class_of(row, tokens);
        const uint8_t* choice = t.choice + row_class * kLevels;
        for (size_t i = 0; i < tokens; ++i) {
            const int n = (row[i] + 3 * (1 << 15) + 1) / 3 - (1 << 15), digit = row[i] - 3 * n;
            plan.chosen[r * tokens + i] = static_cast<uint8_t>(digit_context(choice[level_of(energies[i])], n));
            symbols[r * tokens + i] = static_cast<uint8_t>(1 + (n < 0 ? -digit : digit));
            energies[i] = next_energy(energies[i], row[i], t.gains[row_class]);
        }
    }
    return write_rows(t, entries.data(), plan, symbols.data());
}

// ---- encoding with distributions of the rows' own
//
// Lloyd's algorithm clusters rows by what they would cost in each cluster's distribution. All that decides is integers
// (costs are in 1/256 bit), so that every machine makes the same bitstream. Only symbols that occur are looked at: the
// exponents of floats are a few dozen.

constexpr int kMostFitted = 16;                 // distributions
constexpr size_t kLeastIntegers = 1u << 13;     // for each distribution: with fewer, it takes more bytes than it saves
constexpr int kRounds = 3;                      // of Lloyd's algorithm
constexpr double kPrior = 0.02;                 // added to each symbol's count, so that each one can code every row
constexpr int kCountBits = 15;                  // of a row's counts; those of longer rows are shifted
constexpr int kPad = 32;                        // symbols that a vector has room for
constexpr size_t kCountedBlock = 64;            // bytes that are counted together
constexpr size_t kLeastSampled = 512, kSampledEvery = 4;  // of rows of so many tokens, one block of so many is counted

using Slots = std::array<uint16_t, kSymbols + 1>;

struct Fitted {
    std::vector<Slots> slots;
    std::vector<int> classes;  // of rows
};

// Counts bytes. Equal ones often follow each other: in one table, each would wait for the one before.
void count_bytes(const uint8_t* data, size_t size, uint32_t* counts) {
    uint32_t tables[4][kSymbols] = {};
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t x;
        std::memcpy(&x, data + i, 8);
        for (int k = 0; k < 8; ++k) ++tables[k & 3][x >> 8 * k & 255];
    }
    for (; i < size; ++i) ++tables[0][data[i]];
    for (int s = 0; s < kSymbols; ++s) counts[s] = tables[0][s] + tables[1][s] + tables[2][s] + tables[3][s];
}

// The symbols of rows, and how often each row has them.
struct Counts {
    std::vector<int> symbols;  // those that occur
    size_t width;              // of a row: a count for each symbol, and zeros behind
    std::vector<int16_t> rows;

    // `frames`: (tokens, rows). Of many tokens, every fourth block is counted. Neighbours are of different rows, so no
    // count waits for the one before.
    Counts(const uint8_t* frames, size_t tokens, size_t num_rows) {
        const size_t step = tokens < kLeastSampled ? kCountedBlock : kSampledEvery * kCountedBlock;
        std::vector<size_t> counted;
        for (size_t first = 0; first < tokens; first += step)
            for (size_t i = first; i < std::min(first + kCountedBlock, tokens); ++i) counted.push_back(i * num_rows);
        bool occurs[kSymbols] = {};
        for (size_t begin : counted)
            for (size_t r = 0; r < num_rows; ++r) occurs[frames[begin + r]] = true;
        uint8_t places[kSymbols] = {};
        for (int s = 0; s < kSymbols; ++s)
            if (occurs[s]) {
                places[s] = static_cast<uint8_t>(symbols.size());
                symbols.push_back(s);
            }
        width = (symbols.size() + kPad - 1) / kPad * kPad;
        rows.resize(num_rows * width);
        int shift = 0;
        while (tokens >> shift >= (1u << kCountBits) - 1) ++shift;
        if (shift)
            count<uint32_t>(frames, counted, num_rows, places, shift);
        else
            count<uint16_t>(frames, counted, num_rows, places, shift);
    }

   private:
    static constexpr size_t kAtOnce = 1024;  // rows, whose counts lie in a cache

    template <class Count>
    void count(const uint8_t* frames, const std::vector<size_t>& counted, size_t num_rows, const uint8_t* places,
               int shift) {
        std::vector<Count> found(std::min(kAtOnce, num_rows) * width);
        for (size_t first = 0; first < num_rows; first += kAtOnce) {
            const size_t some = std::min(kAtOnce, num_rows - first);
            std::fill(found.begin(), found.end(), 0);
            for (size_t begin : counted) {
                Count* row = found.data();
                const uint8_t* symbol = frames + begin + first;
                for (size_t r = 0; r < some; ++r, row += width) ++row[places[symbol[r]]];
            }
            for (size_t i = 0; i < some * width; ++i)
                rows[first * width + i] = static_cast<int16_t>((found[i] + (1u << shift) - 1) >> shift);
        }
    }
};

// Returns the slots of a distribution with these counts, of which some are not 0. Symbols of less than half a slot are
// escaped.
Slots slots_of(const int64_t* counts) {
    const double total = static_cast<double>(std::accumulate(counts, counts + kSymbols, int64_t{0}));
    double share[kSymbols + 1], sum = 0;
    for (int s = 0; s < kSymbols; ++s) {
        share[s] = static_cast<double>(counts[s]) / total * ((1 << kBits) - 1);
        if (share[s] < 0.5) share[s] = 0;
        sum += share[s];
    }
    share[kSymbols] = std::max(1.0, (1 << kBits) - sum);
    sum += share[kSymbols];
    Slots slots{};
    int excess = -(1 << kBits);
    for (int s = 0; s <= kSymbols; ++s) {
        if (share[s] > 0)
            slots[s] = static_cast<uint16_t>(std::max(std::nearbyint(share[s] * (1 << kBits) / sum), 1.0));
        excess += slots[s];
    }
    for (; excess; excess += excess > 0 ? -1 : 1) {
        int worst = -1;
        double most = 0;
        for (int s = 0; s <= kSymbols; ++s) {
            const double error = excess > 0 ? slots[s] - share[s] : share[s] - slots[s];
            if (slots[s] > (excess > 0 ? 1 : 0) && (worst < 0 || error > most)) worst = s, most = error;
        }
        slots[worst] = static_cast<uint16_t>(slots[worst] + (excess > 0 ? -1 : 1));
    }
    return slots;
}

// Puts each row into the cluster that costs it least. `counts`: (rows, width); `costs`: (width / 2, kMostFitted, 2), of
// pairs of symbols.
CLONES void assign(const int16_t* counts, size_t rows, size_t width, const int16_t* costs, int clusters, int* classes) {
    for (size_t r = 0; r < rows; ++r) {
        int32_t sums[kMostFitted] = {};
        const int16_t* cost = costs;
        for (const int16_t* pair = counts + r * width; pair < counts + (r + 1) * width; pair += 2, cost += 2 * kMostFitted)
            for (int d = 0; d < kMostFitted; ++d)
                sums[d] += int32_t{pair[0]} * cost[2 * d] + int32_t{pair[1]} * cost[2 * d + 1];
        classes[r] = static_cast<int>(std::min_element(sums, sums + clusters) - sums);
    }
}

#ifdef HAS_AVX512
AVX512 void assign_avx512(const int16_t* counts, size_t rows, size_t width, const int16_t* costs, int clusters,
                          int* classes) {
    const __mmask16 used = static_cast<__mmask16>((1u << clusters) - 1);
    for (size_t r = 0; r < rows; ++r) {
        __m512i sums = _mm512_setzero_si512();
        for (size_t s = 0; s < width; s += 2) {
            int32_t pair;
            std::memcpy(&pair, counts + r * width + s, sizeof(pair));
            const __m512i cost = _mm512_loadu_si512(costs + s * kMostFitted);
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_set1_epi32(pair), cost));
        }
        const __m512i least = _mm512_set1_epi32(_mm512_mask_reduce_min_epi32(used, sums));
        classes[r] = __builtin_ctz(_mm512_mask_cmpeq_epi32_mask(used, sums, least));
    }
}
#endif

// `frames`: (tokens, rows).
Fitted fit(const Tables& t, const uint8_t* frames, size_t tokens, size_t rows) {
    const Counts found(frames, tokens, rows);
    const std::vector<int>& symbols = found.symbols;
    const std::vector<int16_t>& counts = found.rows;
    const size_t width = found.width;
    // Rows of like entropy begin together.
    std::vector<double> keys(1u << kCountBits, -1);
    std::vector<std::pair<double, size_t>> order(rows);
    for (size_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (size_t i = 0; i < symbols.size(); ++i) {
            const int16_t c = counts[r * width + i];
            if (keys[c] < 0) keys[c] = c ? c * std::log2(static_cast<double>(c)) : 0;
            sum += keys[c];
        }
        order[r] = {-sum, r};
    }
    std::sort(order.begin(), order.end());
    const int clusters = static_cast<int>(
        std::min({size_t{kMostFitted}, rows * tokens / kLeastIntegers + 1, rows}));
    Fitted fitted{{}, std::vector<int>(rows)};
    for (size_t i = 0; i < rows; ++i) fitted.classes[order[i].second] = static_cast<int>(i * clusters / rows);

    std::vector<int64_t> sums(clusters * width);
    const auto sum_up = [&] {
        std::fill(sums.begin(), sums.end(), 0);
        for (size_t r = 0; r < rows; ++r)
            for (size_t i = 0; i < width; ++i) sums[fitted.classes[r] * width + i] += counts[r * width + i];
    };
    std::vector<int16_t> costs(kMostFitted * width);
    for (int round = 0; round < kRounds; ++round) {
        sum_up();
        for (int d = 0; d < clusters; ++d) {
            const int64_t* sum = &sums[d * width];
            const double total = static_cast<double>(std::accumulate(sum, sum + width, int64_t{0}));
            const double bits = std::log2(total + kPrior * kSymbols);
            for (size_t i = 0; i < symbols.size(); ++i) {
                const double cost = bits - std::log2(static_cast<double>(sum[i]) + kPrior);
                costs[(i / 2 * kMostFitted + d) * 2 + i % 2] = static_cast<int16_t>(std::lround(256 * cost));
            }
        }
#ifdef HAS_AVX512
        if (t.has_vectors) {
            assign_avx512(counts.data(), rows, width, costs.data(), clusters, fitted.classes.data());
            continue;
        }
#endif
        assign(counts.data(), rows, width, costs.data(), clusters, fitted.classes.data());
    }
    sum_up();
    std::vector<int> numbers(clusters, -1);  // of those that have rows
    for (int d = 0; d < clusters; ++d) {
        if (std::find(fitted.classes.begin(), fitted.classes.end(), d) == fitted.classes.end()) continue;
        int64_t whole[kSymbols] = {};
        for (size_t i = 0; i < symbols.size(); ++i) whole[symbols[i]] = sums[d * width + i];
        numbers[d] = static_cast<int>(fitted.slots.size());
        fitted.slots.push_back(slots_of(whole));
    }
    for (int& row_class : fitted.classes) row_class = numbers[row_class];
    return fitted;
}

// `frames`: (tokens, rows). `t` codes the classes of rows.
std::vector<uint8_t> encode_fitted(const Tables& t, const uint8_t* frames, size_t tokens, size_t rows, Fitted& fitted) {
    fitted = fit(t, frames, tokens, rows);
    std::vector<uint32_t> entries(fitted.slots.size() << 8);
    for (size_t d = 0; d < fitted.slots.size(); ++d) {
        const Slots& slots = fitted.slots[d];
        uint32_t first = 0;
        const uint32_t escape = (1u << kBits) - slots[kSymbols];  // its slots are the last ones
        for (int s = 0; s < kSymbols; ++s) {
            entries[d << 8 | s] = slots[s] ? first | uint32_t{slots[s]} << kBits
                                           : escape | uint32_t{slots[kSymbols]} << kBits | 1u << kEscapeFlag;
            first += slots[s];
        }
    }
    Plan plan(rows, tokens, true);
    std::copy(fitted.classes.begin(), fitted.classes.end(), plan.classes.begin());
    plan.near.resize(fitted.slots.size());
    for (size_t d = 0; d < plan.near.size(); ++d)
        if (!plan.near[d].take(&entries[d << 8])) {
            plan.near.clear();
            break;
        }
    // A few rows are transposed right before they are encoded, from the last one on.
    uint8_t turned[kTile * kWays * kGroup];
    return write(t, entries.data(), plan, [&](size_t r, size_t first, size_t length) {
        const size_t begin = r / kTile * kTile;
        if (r + 1 == rows || (r + 1) % kTile == 0)
            transpose(frames + first * rows + begin, rows, length, r + 1 - begin, turned, length);
        return turned + (r - begin) * length;
    });
}

// Returns the order-0 entropy of bytes, in bits a byte.
double entropy_bits(const uint8_t* data, size_t size) {
    uint32_t counts[kSymbols];
    count_bytes(data, size, counts);
    double bits = 0;
    for (uint32_t count : counts)
        if (count) bits -= count * std::log2(static_cast<double>(count) / static_cast<double>(size));
    return size ? bits / static_cast<double>(size) : 0;
}

// ---- the module

struct Buffer {
    Py_buffer view{};
    ~Buffer() {
        if (view.obj) PyBuffer_Release(&view);
    }
    template <class T>
    const T* as() const {
        return static_cast<const T*>(view.buf);
    }
};

// A tuple (decode, encode, choice, gains, digits, delta, is_portable), as in `Tables`; without vectors if
// `is_portable`.
struct TablesArgument {
    Buffer decode, encode, choice, gains, digits;
    Tables tables{};
    int count = 0;  // of tables

    bool parse(PyObject* tuple) {
        int delta, is_portable;
        if (!PyArg_ParseTuple(tuple, "y*y*y*y*y*ip", &decode.view, &encode.view, &choice.view, &gains.view,
                              &digits.view, &delta, &is_portable))
            return false;
        tables = {decode.as<uint32_t>(), encode.as<uint32_t>(), choice.as<uint8_t>(), gains.as<uint16_t>(), delta,
                  !is_portable && has_avx512(), digits.as<uint32_t>()};
        count = static_cast<int>(encode.view.len >> 10);
        bool fit = count <= 64 && encode.view.len == Py_ssize_t{count} << 10 &&
                   decode.view.len == Py_ssize_t{count} << (kBits + 2) &&
                   choice.view.len == kClasses * kLevels && gains.view.len == 2 * kClasses && delta >= 0 &&
                   delta < count &&
                   (digits.view.len == 4 * kCoarse * count || digits.view.len == 0);
        for (Py_ssize_t i = 0; fit && i < choice.view.len; ++i) fit = tables.choice[i] < count;
        if (!fit) PyErr_SetString(PyExc_ValueError, "tables have the wrong sizes");
        return fit;
    }

    bool has_digits() const {
        if (digits.view.len) return true;
        PyErr_SetString(PyExc_ValueError, "the tables have no distributions of digits");
        return false;
    }
};

bool are_sizes(Py_ssize_t rows, Py_ssize_t tokens, Py_ssize_t size, Py_ssize_t bytes_each = 1) {
    if (rows > 0 && tokens > 0 && tokens <= 1 << 22 && rows <= (1 << 30) / tokens && rows * tokens * bytes_each == size)
        return true;
    PyErr_Format(PyExc_ValueError, "%zd rows of %zd tokens do not fit %zd bytes", rows, tokens, size);
    return false;
}

// Calls `compute()` without the GIL. Returns whether there was memory for it.
template <class Compute>
bool has_memory_for(Compute compute) {
    bool has_memory = true;
    Py_BEGIN_ALLOW_THREADS;
    try {
        compute();
    } catch (const std::bad_alloc&) {
        has_memory = false;
    }
    Py_END_ALLOW_THREADS;
    if (!has_memory) PyErr_NoMemory();
    return has_memory;
}

PyObject* bytes_of(const std::vector<uint8_t>& coded) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(coded.data()), coded.size());
}

PyObject* text_of(const char* fault) {
    if (fault) return PyUnicode_FromString(fault);
    Py_RETURN_NONE;
}

PyObject* py_encode(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer values;
    Py_ssize_t rows, tokens;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*nn", &tuple, &values.view, &rows, &tokens) || !t.parse(tuple) ||
        !are_sizes(rows, tokens, values.view.len))
        return nullptr;
    std::vector<uint8_t> coded;
    return has_memory_for([&] { coded = encode(t.tables, values.as<uint8_t>(), rows, tokens); }) ? bytes_of(coded)
                                                                                                : nullptr;
}

PyObject* py_encode_fitted(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer frames;
    Py_ssize_t tokens, rows;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*nn", &tuple, &frames.view, &tokens, &rows) || !t.parse(tuple) ||
        !are_sizes(rows, tokens, frames.view.len))
        return nullptr;
    std::vector<uint8_t> coded;
    Fitted fitted;
    if (!has_memory_for([&] { coded = encode_fitted(t.tables, frames.as<uint8_t>(), tokens, rows, fitted); }))
        return nullptr;
    return Py_BuildValue("y#y#", reinterpret_cast<const char*>(fitted.slots.data()),
                         static_cast<Py_ssize_t>(fitted.slots.size() * sizeof(Slots)),
                         reinterpret_cast<const char*>(coded.data()), static_cast<Py_ssize_t>(coded.size()));
}

PyObject* py_entropy_bits(PyObject*, PyObject* args) {
    Buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data.view)) return nullptr;
    double bits = 0;
    Py_BEGIN_ALLOW_THREADS;
    bits = entropy_bits(data.as<uint8_t>(), data.view.len);
    Py_END_ALLOW_THREADS;
    return PyFloat_FromDouble(bits);
}

PyObject* py_decode(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer data, out;
    Py_ssize_t rows, tokens;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*nnw*", &tuple, &data.view, &rows, &tokens, &out.view) || !t.parse(tuple) ||
        !are_sizes(rows, tokens, out.view.len))
        return nullptr;
    const char* fault = nullptr;
    return has_memory_for([&] {
               fault = read<Integers<false>>(t.tables, data.as<uint8_t>(), data.view.len, rows, tokens,
                                             static_cast<uint8_t*>(out.view.buf));
           })
               ? text_of(fault)
               : nullptr;
}

PyObject* py_decode_fitted(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer slots, data, out;
    Py_ssize_t tokens, rows;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*y*nnw*", &tuple, &slots.view, &data.view, &tokens, &rows, &out.view) ||
        !t.parse(tuple) || !are_sizes(rows, tokens, out.view.len))
        return nullptr;
    const size_t count = slots.view.len / sizeof(Slots);
    if (count < 1 || count > kMostFitted || slots.view.len % sizeof(Slots) ||
        !OwnTables::are_sound(slots.as<uint16_t>(), count)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not of 1 to %d distributions that add up to %d, with escapes",
                     slots.view.len, kMostFitted, 1 << kBits);
        return nullptr;
    }
    const char* fault = nullptr;
    return has_memory_for([&] {
               const OwnTables own(t.tables, slots.as<uint16_t>(), count);
               fault = read_frames(own.tables(t.tables), data.as<uint8_t>(), data.view.len, rows, tokens,
                                   static_cast<uint8_t*>(out.view.buf));
           })
               ? text_of(fault)
               : nullptr;
}

PyObject* py_encode_digits(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer values;
    Py_ssize_t rows, tokens;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*nn", &tuple, &values.view, &rows, &tokens) || !t.parse(tuple) ||
        !t.has_digits() || !are_sizes(rows, tokens, values.view.len, 2))
        return nullptr;
    std::vector<uint8_t> coded;
    return has_memory_for([&] {
               coded = encode_digits(t.tables, t.count, values.as<int16_t>(), rows, tokens);
           })
               ? bytes_of(coded)
               : nullptr;
}

PyObject* py_refine(PyObject*, PyObject* args) {
    PyObject* tuple;
    Buffer data, values;
    Py_ssize_t rows, tokens;
    TablesArgument t;
    if (!PyArg_ParseTuple(args, "Oy*nnw*", &tuple, &data.view, &rows, &tokens, &values.view) || !t.parse(tuple) ||
        !t.has_digits() || !are_sizes(rows, tokens, values.view.len, 2))
        return nullptr;
    const char* fault = nullptr;
    return has_memory_for([&] {
               fault = read<Digits>(t.tables, data.as<uint8_t>(), data.view.len, rows, tokens,
                                    static_cast<int16_t*>(values.view.buf));
           })
               ? text_of(fault)
               : nullptr;
}

// Joins buffers without the GIL, in huge pages where the kernel has them.
PyObject* py_join(PyObject*, PyObject* pieces) {
    const Py_ssize_t count = PySequence_Size(pieces);
    if (count < 0) return nullptr;
    std::unique_ptr<Buffer[]> held(new Buffer[count]);
    Py_ssize_t size = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* piece = PySequence_GetItem(pieces, i);
        const bool is_buffer = piece && !PyObject_GetBuffer(piece, &held[i].view, PyBUF_SIMPLE);
        Py_XDECREF(piece);
        if (!is_buffer) return nullptr;
        size += held[i].view.len;
    }
    PyObject* whole = PyBytes_FromStringAndSize(nullptr, size);
    if (!whole) return nullptr;
    char* next = PyBytes_AsString(whole);
    Py_BEGIN_ALLOW_THREADS;
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t kHuge = uintptr_t{2} << 20;
    const uintptr_t from = (reinterpret_cast<uintptr_t>(next) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t end = reinterpret_cast<uintptr_t>(next + size) / kHuge * kHuge;
    if (from < end) madvise(reinterpret_cast<void*>(from), end - from, MADV_HUGEPAGE);
#endif
    for (Py_ssize_t i = 0; i < count; ++i) {
        std::memcpy(next, held[i].view.buf, held[i].view.len);
        next += held[i].view.len;
    }
    Py_END_ALLOW_THREADS;
    return whole;
}

PyMethodDef methods[] = {
    {"join", py_join, METH_O, "join(pieces) -> bytes: a sequence of buffers one after another"},
    {"encode", py_encode, METH_VARARGS, "encode(tables, values, rows, tokens) -> bytes"},
    {"encode_fitted", py_encode_fitted, METH_VARARGS,
     "encode_fitted(tables, frames, tokens, rows) -> (slots, bytes): distributions of the rows' own; frames are "
     "(tokens, rows)"},
    {"entropy_bits", py_entropy_bits, METH_VARARGS, "entropy_bits(data) -> order-0 entropy, in bits a byte"},
    {"decode", py_decode, METH_VARARGS, "decode(tables, data, rows, tokens, out) -> None, or what is wrong with data"},
    {"decode_fitted", py_decode_fitted, METH_VARARGS,
     "decode_fitted(tables, slots, data, tokens, rows, out) -> None, or what is wrong with data; out is (tokens, rows)"},
    {"encode_digits", py_encode_digits, METH_VARARGS, "encode_digits(tables, values, rows, tokens) -> bytes"},
    {"refine", py_refine, METH_VARARGS, "refine(tables, data, rows, tokens, values) -> None, or what is wrong"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ans", "The native half of ans.py.", 0, methods};

}  // namespace

PyMODINIT_FUNC PyInit__ans() { return PyModule_Create(&module); }
