// Restoring's product of integers and a matrix, exact in int32. integer_matrix.py makes the matrix; klt.cpp restores.
//
// Most coefficients have little spread: at usual steps half of all integers are zero, and half of the others are 1 or
// -1. So rows of the matrix are of two kinds.
//
// * Frequent rows have larger integers. Their product is dense: two rows at once are multiplied in int16 and added in
//   int32 (`vpdpwssd`, `vpmaddwd`), for a few tokens whose sums stay in registers. Multipliers limit its speed.
// * Rare rows have small ones. Each token has lists of the rows to add and to subtract; a 2 is in its list twice. There
//   is no multiplication, and sums of a few entries stay int16, so a vector holds twice as many channels. Loads of the
//   matrix limit its speed. Integers that do not suit lists are multiplied separately: see Large.
//
// With AVX-512, different units of a CPU limit the two. So they take turns in one loop: after kTurn entries of both
// lists comes a pair of frequent rows. On an EPYC that takes 3.1 ns a value; one kind after the other takes 4.2 ns.
//
// Sums of int16 cannot overflow: after each turn they are added to int32. Nor can sums of int32: see IntegerMatrix.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_VECTORS
#endif

namespace integer_product {

const size_t kTile = 32;         // channels, as in integer_matrix.py
const size_t kBlock = 64;        // tokens, whose integers and product stay in L2 while the matrix passes
const size_t kGroup = 8;         // tokens, whose sums of a tile fill 16 of AVX-512's 32 registers
const size_t kTurn = 4;          // entries of both lists
const size_t kListUnit = 4;      // int16: lists count in units of 8 bytes, by which x86 scales an address for free
const size_t kListSize = 500;    // no power of two, so that lists do not compete for the same sets of L1
const size_t kMostOften = 8;     // how often a list may hold a row
const int kMostRareEntry = 4095;  // as in integer_matrix.py
const uint8_t kZeroInteger = 128;
static_assert(2 * kTurn * kMostRareEntry < 1 << 15, "sums of int16 fit");

struct Product {
    size_t tokens, row_stride, channels;
    size_t pairs, rare;            // of frequent rows; rare rows
    int is_portable;               // without vectors, for tests
    const uint8_t* integers;       // (rows, tokens), row_stride bytes apart
    const int32_t* frequent_rows;  // (pairs, 2): which of the integers' rows
    const uint8_t* shifts;         // (rows,): a row's integers count 2^shift times; 0 for rare rows
    const int32_t* rare_rows;      // (rare,)
    const int16_t* frequent;       // (tiles, pairs, kTile, 2)
    const int16_t* rare_matrix;    // (tiles, 1 + rare, kTile / 2, 2): see channel_of. The first row is zero.
    const float* units;            // (2, tiles * kTile): of the entries of frequent rows, and of rare ones

    size_t tiles() const { return (channels + kTile - 1) / kTile; }
    size_t stride() const { return tiles() * kTile; }  // of a token's product
};

// In a tile, the channel of entry i of a rare row. Two neighbours are half a tile apart, so the instruction that adds
// two products of int16 (here, times 1 and 0) widens one half of a tile to int32, in order.
inline size_t channel_of(size_t i) { return i / 2 + i % 2 * (kTile / 2); }

// A rare row's integer that is large, or finds its token's list full.
struct Large {
    uint32_t token, row;  // in the group; of rare_matrix
    int32_t integer;
};

// The integers of a block of tokens, as the kernels read them. Those beyond the last token are zero.
struct Block {
    std::vector<uint32_t> frequent;  // (groups, pairs, kGroup): two int16
    std::vector<uint16_t> lists;     // (kBlock, 2, kListSize): rows of rare_matrix to add, and to subtract
    uint32_t counts[kBlock][2];      // their lengths: equal, and whole turns, after even_out
    std::vector<Large> large[kBlock / kGroup];

    explicit Block(const Product& p) : frequent(p.pairs * kBlock), lists(kBlock * 2 * kListSize) {}
    uint16_t* list(size_t token, bool is_negative) { return &lists[(2 * token + is_negative) * kListSize]; }
};

// Bit t says whether integer t of kBlock is not zero.
inline uint64_t nonzero_of(const uint8_t* integers) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; ++i) {
        uint64_t x;
        std::memcpy(&x, integers + 8 * i, 8);
        x ^= 0x8080808080808080;
        x = (((x & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f) | x) >> 7 & 0x0101010101010101;
        mask |= (x * 0x0102040810204080) >> 56 << 8 * i;
    }
    return mask;
}

// group_size: from a group's pair to the next group's.
CLONES inline void add_frequent(const uint8_t* integers, int shift, int at, size_t group_size, uint32_t* pair) {
    for (size_t first = 0; first < kBlock; first += kGroup, pair += group_size)
        for (size_t t = 0; t < kGroup; ++t)
            pair[t] |= (((integers[first + t] - uint32_t{kZeroInteger}) << shift) & 0xffff) << at;
}

// row: of rare_matrix.
inline void list_rare(const uint8_t* integers, uint32_t row, Block& b) {
    const uint64_t entries = row * (kTile / kListUnit) * 0x0001000100010001;
    for (uint64_t left = nonzero_of(integers); left; left &= left - 1) {
        const size_t token = __builtin_ctzll(left);
        const int32_t integer = integers[token] - kZeroInteger;
        const size_t often = integer < 0 ? -integer : integer;
        uint32_t& count = b.counts[token][integer < 0];
        if (often > kMostOften || count + kMostOften > kListSize) {
            b.large[token / kGroup].push_back({static_cast<uint32_t>(token % kGroup), row, integer});
        } else {
            std::memcpy(b.list(token, integer < 0) + count, &entries, 8);
            std::memcpy(b.list(token, integer < 0) + count + 4, &entries, 8);
            count += often;
        }
    }
}

// Fills the shorter list up with the row of zeros, and both to whole turns.
inline void even_out(size_t token, Block& b) {
    auto& counts = b.counts[token];
    const uint32_t turns = (std::max(counts[0], counts[1]) + kTurn - 1) / kTurn;
    for (int sign = 0; sign < 2; ++sign) {
        std::fill(b.list(token, sign) + counts[sign], b.list(token, sign) + turns * kTurn, 0);
        counts[sign] = turns * kTurn;
    }
}
static_assert(kListSize % kTurn == 0, "whole turns fit");

inline void read_block(const Product& p, size_t first, Block& b) {
    const size_t tokens = std::min(kBlock, p.tokens - first);
    uint8_t padded[kBlock];
    std::memset(padded, kZeroInteger, kBlock);
    const auto row_of = [&](size_t row) -> const uint8_t* {
        const uint8_t* integers = p.integers + row * p.row_stride + first;
        return tokens == kBlock ? integers : static_cast<uint8_t*>(std::memcpy(padded, integers, tokens));
    };
    std::fill(b.frequent.begin(), b.frequent.end(), 0);
    for (size_t i = 0; i < 2 * p.pairs; ++i) {
        const size_t row = p.frequent_rows[i];
        add_frequent(row_of(row), p.shifts[row], i % 2 * 16, p.pairs * kGroup, &b.frequent[i / 2 * kGroup]);
    }
    std::memset(b.counts, 0, sizeof b.counts);
    for (auto& large : b.large) large.clear();
    for (size_t i = 0; i < p.rare; ++i) list_rare(row_of(p.rare_rows[i]), i + 1, b);
    for (size_t token = 0; token < kBlock; ++token) even_out(token, b);
}

// What a kernel multiplies: a group of tokens and a tile of channels. It adds to the sums. (They come from memory: GCC
// makes worse loops of vectors that start as zeros.)
struct Task {
    size_t pairs;
    const uint32_t* integers;        // (pairs, kGroup)
    const uint16_t* lists;           // (kGroup, 2, kListSize)
    const uint32_t (*counts)[2];     // (kGroup, 2)
    const int16_t *frequent, *rare;  // of the tile
    int32_t (*sums)[kTile], (*rare_sums)[kTile];  // (kGroup, kTile): of frequent rows, and of rare ones
};

// The turns of a token that are left.
struct Turns {
    size_t left;
    const uint16_t *plus, *minus;

    Turns(const Task& k, size_t token)
        : left(k.counts[token][0] / kTurn), plus(k.lists + 2 * token * kListSize), minus(plus + kListSize) {}
    void next() { --left, plus += kTurn, minus += kTurn; }
};

// The pairs of frequent rows that are left.
struct Pairs {
    size_t left;
    const int16_t* matrix;
    const uint32_t* integers;

    Pairs(const Task& k, size_t token) : left(k.pairs), matrix(k.frequent), integers(k.integers + token) {}
    void next() { --left, matrix += kTile * 2, integers += kGroup; }
};

inline void multiply_portable(const Task& k) {
    for (size_t t = 0; t < kGroup; ++t) {
        int32_t *sums = k.sums[t], *rare_sums = k.rare_sums[t];
        for (Turns turns(k, t); turns.left; turns.next()) {
            int16_t few[kTile] = {};
            for (size_t j = 0; j < kTurn; ++j) {
                const int16_t* add = k.rare + turns.plus[j] * kListUnit;
                const int16_t* subtract = k.rare + turns.minus[j] * kListUnit;
                for (size_t i = 0; i < kTile; ++i) few[i] = static_cast<int16_t>(few[i] + add[i] - subtract[i]);
            }
            for (size_t i = 0; i < kTile; ++i) rare_sums[channel_of(i)] += few[i];
        }
        for (Pairs pairs(k, t); pairs.left; pairs.next()) {
            const int16_t* m = pairs.matrix;
            const uint32_t n = *pairs.integers;
            const int32_t low = static_cast<int16_t>(n), high = static_cast<int16_t>(n >> 16);
            for (size_t c = 0; c < kTile; ++c) sums[c] += low * m[2 * c] + high * m[2 * c + 1];
        }
    }
}

#ifdef HAS_VECTORS
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define INLINE inline __attribute__((always_inline))

AVX512 INLINE void add_pair(__m512i (&sums)[kGroup][2], Pairs& pairs) {
    const __m512i low = _mm512_loadu_si512(pairs.matrix), high = _mm512_loadu_si512(pairs.matrix + 32);
#pragma GCC unroll 8
    for (size_t t = 0; t < kGroup; ++t) {
        const __m512i n = _mm512_set1_epi32(pairs.integers[t]);
        sums[t][0] = _mm512_dpwssd_epi32(sums[t][0], n, low);
        sums[t][1] = _mm512_dpwssd_epi32(sums[t][1], n, high);
    }
    pairs.next();
}

AVX512 INLINE void add_turn(__m512i (&sums)[2], const int16_t* rare, Turns& turns) {
    __m512i few = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (size_t i = 0; i < kTurn; ++i) {
        const __m512i add = _mm512_loadu_si512(rare + turns.plus[i] * kListUnit);
        const __m512i subtract = _mm512_loadu_si512(rare + turns.minus[i] * kListUnit);
        few = _mm512_add_epi16(few, _mm512_sub_epi16(add, subtract));
    }
    sums[0] = _mm512_dpwssd_epi32(sums[0], few, _mm512_set1_epi32(1));
    sums[1] = _mm512_dpwssd_epi32(sums[1], few, _mm512_set1_epi32(1 << 16));
    turns.next();
}

AVX512 inline void multiply_avx512(const Task& k) {
    __m512i sums[kGroup][2];
#pragma GCC unroll 8
    for (size_t t = 0; t < kGroup; ++t)
        sums[t][0] = _mm512_loadu_si512(k.sums[t]), sums[t][1] = _mm512_loadu_si512(k.sums[t] + 16);
    Pairs pairs(k, 0);
    for (size_t t = 0; t < kGroup; ++t) {
        Turns turns(k, t);
        int32_t* to = k.rare_sums[t];
        __m512i rare_sums[2] = {_mm512_loadu_si512(to), _mm512_loadu_si512(to + 16)};
        if (turns.left <= pairs.left) {
            while (turns.left) {
                add_turn(rare_sums, k.rare, turns);
                add_pair(sums, pairs);
            }
        } else {
            while (turns.left) add_turn(rare_sums, k.rare, turns);
        }
        _mm512_storeu_si512(to, rare_sums[0]);
        _mm512_storeu_si512(to + 16, rare_sums[1]);
    }
    while (pairs.left) add_pair(sums, pairs);
#pragma GCC unroll 8
    for (size_t t = 0; t < kGroup; ++t) {
        _mm512_storeu_si512(k.sums[t], sums[t][0]);
        _mm512_storeu_si512(k.sums[t] + 16, sums[t][1]);
    }
}

AVX2 INLINE __m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
AVX2 INLINE void store256(__m256i x, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

AVX2 inline void add_turns(Turns turns, const int16_t* rare, int32_t* to) {
    __m256i sums[4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) sums[i] = load256(to + 8 * i);
    for (; turns.left; turns.next()) {
        __m256i few[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
        for (size_t i = 0; i < kTurn; ++i) {
            const int16_t* add = rare + turns.plus[i] * kListUnit;
            const int16_t* subtract = rare + turns.minus[i] * kListUnit;
            few[0] = _mm256_add_epi16(few[0], _mm256_sub_epi16(load256(add), load256(subtract)));
            few[1] = _mm256_add_epi16(few[1], _mm256_sub_epi16(load256(add + 16), load256(subtract + 16)));
        }
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
            const __m256i half = _mm256_set1_epi32(i < 2 ? 1 : 1 << 16);
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(few[i % 2], half));
        }
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) store256(sums[i], to + 8 * i);
}

const size_t kFew = 4;  // tokens, whose sums of half a tile fill eight of AVX2's 16 registers

AVX2 inline void add_pairs(Pairs pairs, int32_t (*to)[kTile]) {
    __m256i sums[kFew][2];
#pragma GCC unroll 4
    for (size_t t = 0; t < kFew; ++t) sums[t][0] = load256(to[t]), sums[t][1] = load256(to[t] + 8);
    for (; pairs.left; pairs.next()) {
        __m256i low = load256(pairs.matrix), high = load256(pairs.matrix + 16);
        asm("" : "+x"(low), "+x"(high));  // compilers would load them again for each token
#pragma GCC unroll 4
        for (size_t t = 0; t < kFew; ++t) {
            const __m256i n = _mm256_set1_epi32(pairs.integers[t]);
            sums[t][0] = _mm256_add_epi32(sums[t][0], _mm256_madd_epi16(n, low));
            sums[t][1] = _mm256_add_epi32(sums[t][1], _mm256_madd_epi16(n, high));
        }
    }
#pragma GCC unroll 4
    for (size_t t = 0; t < kFew; ++t) store256(sums[t][0], to[t]), store256(sums[t][1], to[t] + 8);
}

// One kind of rows after the other: with 256 bits frequent rows need most loads, too.
AVX2 inline void multiply_avx2(const Task& k) {
    for (size_t t = 0; t < kGroup; ++t) add_turns(Turns(k, t), k.rare, k.rare_sums[t]);
    for (size_t half = 0; half < 2; ++half)
        for (size_t first = 0; first < kGroup; first += kFew) {
            Pairs pairs(k, first);
            pairs.matrix += half * kTile;
            add_pairs(pairs, reinterpret_cast<int32_t(*)[kTile]>(k.sums[first] + half * (kTile / 2)));
        }
}
#endif

CLONES inline void add_large(int32_t integer, const int16_t* row, int32_t* sums) {
    for (size_t c = 0; c < kTile / 2; ++c) {
        sums[c] += integer * row[2 * c];
        sums[c + kTile / 2] += integer * row[2 * c + 1];
    }
}

// Leaves zeros behind, for the next task.
CLONES inline void store_sums(const Task& k, const float* units, const float* rare_units, size_t stride, float* out) {
    for (size_t t = 0; t < kGroup; ++t, out += stride) {
        int32_t *sums = k.sums[t], *rare_sums = k.rare_sums[t];
        for (size_t c = 0; c < kTile; ++c)
            out[c] = static_cast<float>(sums[c]) * units[c] + static_cast<float>(rare_sums[c]) * rare_units[c];
        for (size_t c = 0; c < kTile; ++c) sums[c] = rare_sums[c] = 0;
    }
}

// Writes the product of the first tokens of a block, float32 (tokens in whole groups, stride).
inline void multiply(const Product& p, const Block& b, size_t tokens, float* out) {
    auto* kernel = multiply_portable;
#ifdef HAS_VECTORS
    if (!p.is_portable && __builtin_cpu_supports("avx2")) kernel = multiply_avx2;
    if (!p.is_portable && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"))
        kernel = multiply_avx512;
#endif
    alignas(64) int32_t sums[kGroup][kTile] = {}, rare_sums[kGroup][kTile] = {};
    for (size_t tile = 0; tile < p.tiles(); ++tile) {
        const int16_t* frequent = p.frequent + tile * p.pairs * kTile * 2;
        const int16_t* rare = p.rare_matrix + tile * (1 + p.rare) * kTile;
        const float* units = p.units + tile * kTile;
        for (size_t first = 0; first < tokens; first += kGroup) {
            for (const Large& x : b.large[first / kGroup])
                add_large(x.integer, rare + x.row * kTile, rare_sums[x.token]);
            const Task task{p.pairs,          b.frequent.data() + first * p.pairs, &b.lists[2 * first * kListSize],
                            b.counts + first, frequent,                     rare,
                            sums,             rare_sums};
            kernel(task);
            store_sums(task, units, units + p.stride(), p.stride(), out + first * p.stride() + tile * kTile);
        }
    }
}

}  // namespace integer_product
