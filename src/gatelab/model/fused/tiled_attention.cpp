// Causal attention in bfloat16 by tiles, forward and backward. tiled_attention.py has its shapes and its equations.
//
// A tile holds up to SEEN keys by up to ASKING queries of one head. Keys are its rows and queries its columns, so that
// what belongs to a query (its largest logit, its sum) is a vector along the contiguous dimension. Products multiply
// bfloat16 and add up in float32, by the routine that PyTorch's own kernels use. Their right-hand factors are
// "paired": element (r, c) lies at (r / 2, c, r % 2), as the processor reads them. Probabilities and gradients of
// logits are rounded where they enter a product, and results once at the end; nothing else is.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using Bits = uint16_t;  // of a bfloat16

constexpr int64_t ASKING = 64, SEEN = 256;
constexpr float LOG2_E = 1.44269504f;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

struct Sizes {
  int64_t rows, tokens, heads, kv_heads, size, value_size;

  int64_t even_tokens() const { return tokens + tokens % 2; }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(size)); }
};

// A (B T heads channels) tensor, its channels side by side.
struct View {
  const Bits* base;
  int64_t row_stride, token_stride, head_stride;

  const Bits* at(int64_t row, int64_t token, int64_t head) const {
    return base + row * row_stride + token * token_stride + head * head_stride;
  }
};

int64_t even(int64_t count) { return count + count % 2; }

// To the nearest bfloat16, halves to even: its bits.
uint32_t rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

float wide(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// 2^x to 2e-7 of itself, and 0 below 2^-126: the series of e^(f ln 2) around the nearest whole number. A mathematics
// library's function is a call in the innermost loop, and slow for hidden logits.
float power_of_two(float x) {
  const float whole = std::rint(x), f = x - whole;
  float series = 1.5403530e-4f;
  for (const float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) {
    series = series * f + factor;
  }
  const float power = std::bit_cast<float>((static_cast<int32_t>(whole) + 127) << 23);
  return x < -126.f ? 0.f : series * power;
}

// (rows x inner) times a paired (inner x columns), ``inner`` even, to or onto a (rows x columns) of float32.
void multiply(int64_t rows, int64_t columns, int64_t inner, const Bits* left, int64_t stride, const Bits* right,
              float* out, bool add) {
  at::native::cpublas::brgemm(rows, columns, inner, stride, columns, columns, add,
                              reinterpret_cast<const at::BFloat16*>(left),
                              reinterpret_cast<const at::BFloat16*>(right), out);
}

// Rows of a (rows x columns) matrix paired; an odd last one is paired with zeros.
void pair_rows(const Bits* in, int64_t stride, int64_t rows, int64_t columns, Bits* out) {
  auto* pairs = reinterpret_cast<uint32_t*>(out);
  for (int64_t r = 0; r < rows; r += 2) {
    const Bits *one = in + r * stride, *two = one + stride;
    for (int64_t c = 0; c < columns; c++) {
      pairs[r / 2 * columns + c] = one[c] | (r + 1 < rows ? static_cast<uint32_t>(two[c]) << 16 : 0);
    }
  }
}

// The paired transpose of a (rows x columns) matrix with an even number of columns: pairs of columns change places.
void pair_transposed(const Bits* in, int64_t stride, int64_t rows, int64_t columns, Bits* out) {
  auto* pairs = reinterpret_cast<uint32_t*>(out);
  for (int64_t c = 0; c < columns / 2; c++) {
    for (int64_t r = 0; r < rows; r++) {
      pairs[c * rows + r] = *reinterpret_cast<const uint32_t*>(in + r * stride + 2 * c);
    }
  }
}

// (tokens x channels) as (channels x even tokens), a last token that is not there being zero.
void transpose(const Bits* in, int64_t stride, int64_t tokens, int64_t channels, Bits* out) {
  constexpr int64_t NEAR = 32;  // tokens whose channels stay in the nearest cache
  for (int64_t first = 0; first < even(tokens); first += NEAR) {
    for (int64_t c = 0; c < channels; c++) {
      for (int64_t t = first; t < std::min(first + NEAR, even(tokens)); t++) {
        out[c * even(tokens) + t] = t < tokens ? in[t * stride + c] : Bits(0);
      }
    }
  }
}

// Hide from a tile's queries, of which the first is ``query``, the keys after them, of which the first is ``key``; and
// the row after the last, which an odd number of keys is paired with.
void hide_later_keys(float* logits, int64_t key, int64_t keys, int64_t query, int64_t queries) {
  for (int64_t s = 0; s < keys; s++) {
    std::fill_n(logits + s * queries, std::clamp<int64_t>(key + s - query, 0, queries), HIDDEN);
  }
  if (keys % 2) std::fill_n(logits + keys * queries, queries, HIDDEN);
}

// The outputs of one key head's queries.
class Forward {
 public:
  Forward(const Sizes& sizes, const View& query, const View& key, const View& value, Bits* output,
          float* normalizer)
      : z(sizes), query(query), key(key), value(value), output(output), normalizer(normalizer),
        values(z.value_size * z.even_tokens()), asking(z.size * ASKING), pairs(SEEN * ASKING / 2),
        logits(SEEN * ASKING), sums(z.value_size * ASKING), largest(ASKING), total(ASKING), shrink(ASKING) {}

  void run(int64_t row, int64_t kv_head) {
    transpose(value.at(row, 0, kv_head), value.token_stride, z.tokens, z.value_size, values.data());
    const int64_t group = z.heads / z.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      for (int64_t first = 0; first < z.tokens; first += ASKING) ask(row, kv_head, head, first);
    }
  }

 private:
  void ask(int64_t row, int64_t kv_head, int64_t head, int64_t first) {
    const int64_t queries = std::min(ASKING, z.tokens - first);
    pair_transposed(query.at(row, first, head), query.token_stride, queries, z.size, asking.data());
    std::fill(largest.begin(), largest.end(), HIDDEN);
    std::fill(total.begin(), total.end(), 0.f);
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t from = 0; from < first + queries; from += SEEN) {
      const int64_t keys = std::min(SEEN, first + queries - from);
      multiply(keys, queries, z.size, key.at(row, from, kv_head), key.token_stride, asking.data(), logits.data(),
               false);
      hide_later_keys(logits.data(), from, keys, first, queries);
      weigh(keys, queries);
      multiply(z.value_size, queries, even(keys), values.data() + from, z.even_tokens(),
               reinterpret_cast<const Bits*>(pairs.data()), sums.data(), true);
    }
    for (int64_t r = 0; r < queries; r++) {
      normalizer[(row * z.heads + head) * z.tokens + first + r] = largest[r] + std::log2(total[r]);
      Bits* out = output + ((row * z.tokens + first + r) * z.heads + head) * z.value_size;
      for (int64_t c = 0; c < z.value_size; c++) out[c] = rounded(sums[c * queries + r] / total[r]);
    }
  }

  // Logits of a tile to weights relative to each query's largest so far, and what was summed before to the same.
  void weigh(int64_t keys, int64_t queries) {
    const float scale = z.scale() * LOG2_E;
    std::copy(largest.begin(), largest.end(), shrink.begin());
    for (int64_t s = 0; s < keys; s++) {
      for (int64_t r = 0; r < queries; r++) largest[r] = std::max(largest[r], logits[s * queries + r] * scale);
    }
    for (int64_t r = 0; r < queries; r++) {
      shrink[r] = power_of_two(shrink[r] - largest[r]);
      total[r] *= shrink[r];
    }
    for (int64_t c = 0; c < z.value_size; c++) {
      for (int64_t r = 0; r < queries; r++) sums[c * queries + r] *= shrink[r];
    }
    for (int64_t s = 0; s < keys; s += 2) {
      const float* one = logits.data() + s * queries;
      const float* two = one + queries;
#pragma omp simd
      for (int64_t r = 0; r < queries; r++) {
        const float a = power_of_two(one[r] * scale - largest[r]), b = power_of_two(two[r] * scale - largest[r]);
        total[r] += a + b;
        pairs[s / 2 * queries + r] = rounded(a) | rounded(b) << 16;
      }
    }
  }

  const Sizes z;
  const View query, key, value;
  Bits* output;
  float* normalizer;
  std::vector<Bits> values;         // (Cv x even tokens)
  std::vector<Bits> asking;         // (C x queries), paired
  std::vector<uint32_t> pairs;      // the weights, (keys x queries), paired
  std::vector<float> logits, sums;  // (keys x queries), (Cv x queries)
  std::vector<float> largest, total, shrink;
};

// The gradients of one key head, its values and its queries.
class Backward {
 public:
  Backward(const Sizes& sizes, const View& query, const View& key, const View& value, const View& output,
           const View& upstream, const float* normalizer, Bits* of_query, Bits* of_key, Bits* of_value)
      : z(sizes), query(query), key(key), value(value), output(output), upstream(upstream), normalizer(normalizer),
        of_query(of_query), of_key(of_key), of_value(of_value), turned_keys(z.size * z.even_tokens()),
        asking(z.size * ASKING), asking_rows(z.size * ASKING), pulling(z.value_size * ASKING),
        pulling_rows(z.value_size * ASKING), weights(SEEN * ASKING), of_logits(SEEN * ASKING), pairs(SEEN * ASKING / 2),
        logits(SEEN * ASKING), of_weights(SEEN * ASKING), of_queries(z.size * ASKING), means(ASKING),
        of_keys(z.tokens * z.size), of_values(z.tokens * z.value_size) {}

  void run(int64_t row, int64_t kv_head) {
    transpose(key.at(row, 0, kv_head), key.token_stride, z.tokens, z.size, turned_keys.data());
    std::fill(of_keys.begin(), of_keys.end(), 0.f);
    std::fill(of_values.begin(), of_values.end(), 0.f);
    const int64_t group = z.heads / z.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      for (int64_t first = 0; first < z.tokens; first += ASKING) ask(row, kv_head, head, first);
    }
    for (int64_t t = 0; t < z.tokens; t++) {
      const int64_t place = (row * z.tokens + t) * z.kv_heads + kv_head;
      for (int64_t c = 0; c < z.size; c++) of_key[place * z.size + c] = rounded(of_keys[t * z.size + c] * z.scale());
      for (int64_t c = 0; c < z.value_size; c++) {
        of_value[place * z.value_size + c] = rounded(of_values[t * z.value_size + c]);
      }
    }
  }

 private:
  void ask(int64_t row, int64_t kv_head, int64_t head, int64_t first) {
    const int64_t queries = std::min(ASKING, z.tokens - first), width = even(queries);
    const Bits *own = query.at(row, first, head), *pull = upstream.at(row, first, head);
    pair_transposed(own, query.token_stride, queries, z.size, asking.data());
    pair_rows(own, query.token_stride, queries, z.size, asking_rows.data());
    pair_transposed(pull, upstream.token_stride, queries, z.value_size, pulling.data());
    pair_rows(pull, upstream.token_stride, queries, z.value_size, pulling_rows.data());
    for (int64_t r = 0; r < queries; r++) {
      means[r] = product(upstream.at(row, first + r, head), output.at(row, first + r, head), z.value_size);
    }
    std::fill(of_queries.begin(), of_queries.end(), 0.f);
    for (int64_t from = 0; from < first + queries; from += SEEN) {
      const int64_t keys = std::min(SEEN, first + queries - from);
      multiply(keys, queries, z.size, key.at(row, from, kv_head), key.token_stride, asking.data(), logits.data(),
               false);
      multiply(keys, queries, z.value_size, value.at(row, from, kv_head), value.token_stride, pulling.data(),
               of_weights.data(), false);
      hide_later_keys(logits.data(), from, keys, first, queries);
      if (keys % 2) std::fill_n(of_weights.data() + keys * queries, queries, 0.f);
      derive(keys, queries, normalizer + (row * z.heads + head) * z.tokens + first);
      multiply(keys, z.value_size, width, weights.data(), width, pulling_rows.data(),
               of_values.data() + from * z.value_size, true);
      multiply(keys, z.size, width, of_logits.data(), width, asking_rows.data(), of_keys.data() + from * z.size, true);
      multiply(z.size, queries, even(keys), turned_keys.data() + from, z.even_tokens(),
               reinterpret_cast<const Bits*>(pairs.data()), of_queries.data(), true);
    }
    for (int64_t r = 0; r < queries; r++) {
      Bits* out = of_query + ((row * z.tokens + first + r) * z.heads + head) * z.size;
      for (int64_t c = 0; c < z.size; c++) out[c] = rounded(of_queries[c * queries + r] * z.scale());
    }
  }

  // Logits and gradients of weights to weights and gradients of logits, up to the scale: the latter also paired.
  void derive(int64_t keys, int64_t queries, const float* norm) {
    const int64_t width = even(queries);
    const float scale = z.scale() * LOG2_E;
    for (int64_t s = 0; s < keys; s += 2) {
      const float *one = logits.data() + s * queries, *two = one + queries;
      const float *of_one = of_weights.data() + s * queries, *of_two = of_one + queries;
      Bits *to_weights = weights.data() + s * width, *to_logits = of_logits.data() + s * width;
#pragma omp simd
      for (int64_t r = 0; r < queries; r++) {
        const float a = power_of_two(one[r] * scale - norm[r]), b = power_of_two(two[r] * scale - norm[r]);
        const uint32_t of_a = rounded(a * (of_one[r] - means[r])), of_b = rounded(b * (of_two[r] - means[r]));
        to_weights[r] = rounded(a);
        to_weights[width + r] = rounded(b);
        to_logits[r] = of_a;
        to_logits[width + r] = of_b;
        pairs[s / 2 * queries + r] = of_a | of_b << 16;
      }
      if (queries % 2) {
        to_weights[queries] = to_weights[width + queries] = 0;
        to_logits[queries] = to_logits[width + queries] = 0;
      }
    }
  }

  static float product(const Bits* one, const Bits* two, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < count; c++) sum += wide(one[c]) * wide(two[c]);
    return sum;
  }

  const Sizes z;
  const View query, key, value, output, upstream;
  const float* normalizer;
  Bits *of_query, *of_key, *of_value;
  std::vector<Bits> turned_keys;                                 // (C x even tokens)
  std::vector<Bits> asking, asking_rows, pulling, pulling_rows;  // queries and upstream gradients, paired both ways
  std::vector<Bits> weights, of_logits;                          // (keys x even queries)
  std::vector<uint32_t> pairs;                                   // of_logits, paired
  std::vector<float> logits, of_weights, of_queries;             // (keys x queries) twice, (C x queries)
  std::vector<float> means;                                      // of the weights' gradients, by query
  std::vector<float> of_keys, of_values;                         // (T x C), (T x Cv)
};

// Each key head of each row by itself, so that no two threads add to one gradient.
template <typename Pass, typename... Arguments>
void run_all(const Sizes& sizes, const Arguments&... arguments) {
  at::parallel_for(0, sizes.rows * sizes.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Pass pass(sizes, arguments...);
    for (int64_t task = begin; task < end; task++) pass.run(task / sizes.kv_heads, task % sizes.kv_heads);
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace

// Whether the processor that this was built for multiplies bfloat16, and PyTorch may use it.
extern "C" int is_supported() {
#ifdef __AVX512BF16__
  return at::globalContext().userEnabledMkldnn();
#else
  return 0;
#endif
}

// ``output`` (B T H Cv) and ``normalizer`` (B H T), the binary logarithm of each query's sum, are filled.
extern "C" void forward(const Sizes* sizes, const View* query, const View* key, const View* value, Bits* output,
                        float* normalizer) {
  run_all<Forward>(*sizes, *query, *key, *value, output, normalizer);
}

// ``of_query``, ``of_key`` and ``of_value``, contiguous, are filled.
extern "C" void backward(const Sizes* sizes, const View* query, const View* key, const View* value, const View* output,
                         const View* upstream, const float* normalizer, Bits* of_query, Bits* of_key,
                         Bits* of_value) {
  run_all<Backward>(*sizes, *query, *key, *value, *output, *upstream, normalizer, of_query, of_key, of_value);
}
