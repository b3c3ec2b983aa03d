// Acceptance of a chain straight from float32 logits: the floor of the two rules on a CPU.
//
//   accept_token   reads a request's rows up to its first rejection        (early stop)
//   accept_block   reads every row, then every pair once more              (full read)
//   row_laws       maximum and log of the sum of every row
//   sample_rows    a token of every row by its coin
//
// Layout: target rows [batch, gamma + 1, vocab], draft rows [batch, gamma, vocab], both contiguous;
// tokens [batch, gamma]; one temperature. A draw is the inverse CDF in id order: tile, then id.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int TILE = 8192;  // 32 kB: a tile is read from memory once for both loops over it

struct Row {
  const float* logits;
  float max;
  float log_sum;
};

Row read_row(const float* logits, int vocab, float scale) {
  float largest = -INFINITY, sum = 0.0f;
  for (int begin = 0; begin < vocab; begin += TILE) {
    const int end = begin + TILE < vocab ? begin + TILE : vocab;
    float tile = largest;
#pragma omp simd reduction(max : tile)
    for (int i = begin; i < end; ++i) tile = logits[i] > tile ? logits[i] : tile;
    if (tile > largest) {
      sum *= begin == 0 ? 0.0f : std::exp((largest - tile) * scale);
      largest = tile;
    }
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (int i = begin; i < end; ++i) part += std::exp((logits[i] - largest) * scale);
    sum += part;
  }
  return {logits, largest, std::log(sum)};
}

float probability(const Row& row, int64_t id, float scale) {
  return std::exp((row.logits[id] - row.max) * scale - row.log_sum);
}

// Mass of (a p - q)+ by tile; without a draft row, of p.
double tile_masses(double* masses, const Row& p, const Row* q, float a, int vocab, float scale) {
  double total = 0.0;
  for (int begin = 0, tile = 0; begin < vocab; begin += TILE, ++tile) {
    const int end = begin + TILE < vocab ? begin + TILE : vocab;
    float part = 0.0f;
    if (q) {
#pragma omp simd reduction(+ : part)
      for (int i = begin; i < end; ++i) {
        const float r = a * std::exp((p.logits[i] - p.max) * scale - p.log_sum) -
                        std::exp((q->logits[i] - q->max) * scale - q->log_sum);
        part += r > 0.0f ? r : 0.0f;
      }
    } else {
#pragma omp simd reduction(+ : part)
      for (int i = begin; i < end; ++i)
        part += std::exp((p.logits[i] - p.max) * scale - p.log_sum);
    }
    masses[tile] = part;
    total += part;
  }
  return total;
}

int64_t draw(const double* masses, double total, double coin, const Row& p, const Row* q, float a,
             int vocab, float scale) {
  double left = coin * total;
  int begin = 0, tile = 0;
  while (begin + TILE < vocab && left >= masses[tile]) {
    left -= masses[tile++];
    begin += TILE;
  }
  const int end = begin + TILE < vocab ? begin + TILE : vocab;
  int64_t last = begin;
  for (int i = begin; i < end; ++i) {
    float r = a * probability(p, i, scale) - (q ? probability(*q, i, scale) : 0.0f);
    if (r <= 0.0f) continue;
    last = i;
    if (left < r) break;
    left -= r;
  }
  return last;
}

void finish(int64_t* out, int gamma, int accepted, const int64_t* tokens, int64_t last) {
  for (int i = 0; i < accepted; ++i) out[i] = tokens[i];
  out[accepted] = last;
  for (int i = accepted + 1; i <= gamma; ++i) out[i] = -1;
}

}  // namespace

extern "C" void accept_token(int64_t* out, const float* target, const float* draft,
                             const int64_t* tokens, const double* accept_coins,
                             const double* final_coins, int batch, int gamma, int vocab,
                             float inv_temperature) {
  const float scale = inv_temperature;
#pragma omp parallel for schedule(dynamic)
  for (int b = 0; b < batch; ++b) {
    const float* target_rows = target + int64_t(b) * (gamma + 1) * vocab;
    const float* draft_rows = draft + int64_t(b) * gamma * vocab;
    std::vector<double> masses((vocab + TILE - 1) / TILE);
    Row p = read_row(target_rows, vocab, scale), q = p;
    int n = 0;
    for (; n < gamma; ++n) {
      const int64_t y = tokens[b * gamma + n];
      q = read_row(draft_rows + int64_t(n) * vocab, vocab, scale);
      const double u = accept_coins[b * gamma + n];
      if (!(u * probability(q, y, scale) < probability(p, y, scale))) break;
      p = read_row(target_rows + int64_t(n + 1) * vocab, vocab, scale);
    }
    const Row* other = n < gamma ? &q : nullptr;
    const double total = tile_masses(masses.data(), p, other, 1.0f, vocab, scale);
    const int64_t last =
        draw(masses.data(), total, final_coins[b], p, other, 1.0f, vocab, scale);
    finish(out + int64_t(b) * (gamma + 1), gamma, n, tokens + b * gamma, last);
  }
}

extern "C" void accept_block(int64_t* out, const float* target, const float* draft,
                             const int64_t* tokens, const double* accept_coins,
                             const double* final_coins, int batch, int gamma, int vocab,
                             float inv_temperature) {
  const float scale = inv_temperature;
  const int tiles = (vocab + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
  for (int b = 0; b < batch; ++b) {
    std::vector<Row> p, q;
    for (int i = 0; i <= gamma; ++i)
      p.push_back(read_row(target + (int64_t(b) * (gamma + 1) + i) * vocab, vocab, scale));
    for (int i = 0; i < gamma; ++i)
      q.push_back(read_row(draft + (int64_t(b) * gamma + i) * vocab, vocab, scale));
    std::vector<double> masses(size_t(gamma + 1) * tiles), totals(gamma + 1), a(gamma + 1, 1.0);
    int n = 0;
    for (int i = 0; i <= gamma; ++i) {
      if (i > 0) {
        const int64_t y = tokens[b * gamma + i - 1];
        const double grown =
            a[i - 1] * probability(p[i - 1], y, scale) / probability(q[i - 1], y, scale);
        a[i] = grown < 1.0 ? grown : 1.0;
      }
      const Row* other = i < gamma ? &q[i] : nullptr;
      totals[i] = tile_masses(&masses[size_t(i) * tiles], p[i], other, float(a[i]), vocab, scale);
      if (i == 0) continue;
      const double whole = totals[i] + (1.0 - a[i]);
      const double h = i == gamma ? a[i] : whole > 0.0 ? totals[i] / whole : 1.0;
      if (accept_coins[b * gamma + i - 1] < h) n = i;
    }
    const Row* other = n < gamma ? &q[n] : nullptr;
    const float weight = n < gamma ? float(a[n]) : 1.0f;
    const double total = n < gamma ? totals[n]
                                   : tile_masses(&masses[size_t(n) * tiles], p[n], nullptr, 1.0f,
                                                 vocab, scale);
    const int64_t last = draw(&masses[size_t(n) * tiles], total, final_coins[b], p[n], other,
                              weight, vocab, scale);
    finish(out + int64_t(b) * (gamma + 1), gamma, n, tokens + b * gamma, last);
  }
}

extern "C" void row_laws(float* max, float* log_sum, const float* logits, int rows, int vocab,
                         float inv_temperature) {
#pragma omp parallel for schedule(static)
  for (int r = 0; r < rows; ++r) {
    const Row row = read_row(logits + int64_t(r) * vocab, vocab, inv_temperature);
    max[r] = row.max;
    log_sum[r] = row.log_sum;
  }
}

extern "C" void sample_rows(int64_t* out, const float* logits, const float* max,
                            const float* log_sum, const double* coins, int rows, int vocab,
                            float inv_temperature) {
#pragma omp parallel for schedule(static)
  for (int r = 0; r < rows; ++r) {
    std::vector<double> masses((vocab + TILE - 1) / TILE);
    const Row row{logits + int64_t(r) * vocab, max[r], log_sum[r]};
    const double total = tile_masses(masses.data(), row, nullptr, 1.0f, vocab, inv_temperature);
    out[r] = draw(masses.data(), total, coins[r], row, nullptr, 1.0f, vocab, inv_temperature);
  }
}
