// Runs the native halves of `ans` and `klt` without Python, so that a test can run them on an emulated CPU.
//
// CODER or QUANTISER says which source is compiled. Arguments are sizes; arrays come from stdin, results go to stdout.

#include <cstdio>
#include <cstdlib>

#if defined(CODER)
#include "../../sgl_kvfetch/codec/bitstream/ans.cpp"
#elif defined(QUANTISER)
#include "../../sgl_kvfetch/codec/quant/klt.cpp"
#endif

namespace {

template <class T>
std::vector<T> read_array(size_t count) {
    std::vector<T> array(count);
    if (std::fread(array.data(), sizeof(T), count, stdin) != count) std::abort();
    return array;
}

template <class T>
void write_array(const std::vector<T>& array) {
    if (std::fwrite(array.data(), sizeof(T), array.size(), stdout) != array.size()) std::abort();
}

#if defined(CODER)
// Arguments: rows, tokens, number of tables. Writes what is decoded, then the bitstream.
void run(const size_t* n) {
    const size_t rows = n[0], tokens = n[1], tables = n[2];
    const auto decode_table = read_array<uint32_t>(tables << kBits), encode_table = read_array<uint32_t>(tables << 8);
    const auto choice = read_array<uint8_t>(kClasses * kLevels);
    const auto gains = read_array<uint16_t>(kClasses);
    const auto values = read_array<uint8_t>(rows * tokens);
    const Tables t{decode_table.data(), encode_table.data(), choice.data(), gains.data(), 17, false};
    const auto coded = encode(t, values.data(), rows, tokens);
    std::vector<uint8_t> decoded(rows * tokens);
    if (read(t, coded.data(), coded.size(), rows, tokens, decoded.data())) std::abort();
    write_array(decoded);
    write_array(coded);
}
#elif defined(QUANTISER)
// Arguments: tokens, heads, pairs, whether they are interleaved, types of product and values, kept and wide rows.
// Heads have 32 channels. Writes the values that are restored from a product, and what its coefficients become.
void run(const size_t* n) {
    const size_t dim = 32;
    Cell c{n[0], n[1], dim, dim, n[2], static_cast<int>(n[3]), static_cast<Type>(n[4]), static_cast<Type>(n[5])};
    const size_t channels = c.channels(), kept = n[6], wide = n[7], size = c.product_type == kFloat32 ? 4 : 2;
    const auto product = read_array<char>(c.tokens * channels * size);
    const auto scales = read_array<float>(c.tokens), mean = read_array<float>(channels);
    const auto table = read_array<float>(c.tokens * 2 * c.pairs), spread = read_array<float>(channels);
    const auto weights = read_array<float>(channels + 2 * c.heads + 1), limits = read_array<float>(kept);
    const auto which = read_array<int64_t>(wide), bits = read_array<int64_t>(wide);
    std::vector<char> k(c.tokens * c.heads * dim * (c.type == kFloat32 ? 4 : 2)), v(k.size());
    c.product = product.data(), c.scales = scales.data(), c.mean = mean.data(), c.table = table.data();
    c.k = k.data(), c.v = v.data();
    restore(c);
    write_array(k);
    write_array(v);
    std::vector<char> centred(product.size());
    std::vector<float> log_norms(c.tokens * 2 * c.heads);
    const size_t stride = k.size() / c.tokens;
    if (!centre(c, 1, {k.data(), stride, stride}, {v.data(), stride, stride}, centred.data(), log_norms.data()))
        std::abort();
    write_array(centred);
    // Of the coefficients that are not kept, the first ones pass for sums.
    const Rows rows{channels, kept, wide, spread.data(), weights.data(), 2.0, limits.data(), which.data(), bits.data()};
    std::vector<uint8_t> exponents(c.tokens), integers(rows.count() * c.tokens), doubtful(c.tokens);
    round_steps(c, rows, 1, 0.25f, log_norms.data(), exponents.data(), integers.data(), doubtful.data());
    write_array(doubtful);
    write_array(exponents);
    write_array(integers);
}
#endif

}  // namespace

int main(int count, char** arguments) {
    std::vector<size_t> sizes;
    for (int i = 1; i < count; ++i) sizes.push_back(std::strtoull(arguments[i], nullptr, 10));
    run(sizes.data());
}
