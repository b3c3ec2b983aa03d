// Acceptance of a chain by the token rule straight from float32 logits: three launches.
//
//   statistics   (rows, tiles)    maximum and sum of every tile of every row
//   masses       (batch, tiles)   the scan again, then the tile masses of (p - q)+ at the rejection
//   decide       (batch,)         tile by prefix sum, id by a scan of the tile
//
// Layout as in accept.cpp. vocab is a multiple of 4; gamma <= 16, vocab <= 64 tiles.

#include <cmath>
#include <cstdint>

namespace {

constexpr int THREADS = 256;
constexpr int TILE = 8192;

struct Law {
  float max, log_sum;
};

__device__ float reduce(float x, bool is_max) {
  __shared__ float shared[THREADS / 32];
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    x = is_max ? fmaxf(x, other) : x + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
  for (int i = 1; i < THREADS / 32; ++i) x = is_max ? fmaxf(x, shared[i]) : x + shared[i];
  return x;
}

// Row r < batch * (gamma + 1) is a target row, the others are draft rows.
__global__ void statistics(float2* out, const float* target, const float* draft, int target_rows,
                           int vocab, float scale) {
  const int row = blockIdx.x, tile = blockIdx.y;
  const float* logits = row < target_rows ? target + int64_t(row) * vocab
                                          : draft + int64_t(row - target_rows) * vocab;
  const float4* words = reinterpret_cast<const float4*>(logits);
  float4 held[TILE / 4 / THREADS];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < TILE / 4 / THREADS; ++i) {
    const int at = tile * (TILE / 4) + i * THREADS + threadIdx.x;
    const float none = -INFINITY;
    held[i] = at < vocab / 4 ? words[at] : make_float4(none, none, none, none);
    largest = fmaxf(fmaxf(fmaxf(held[i].x, held[i].y), fmaxf(held[i].z, held[i].w)), largest);
  }
  largest = reduce(largest, true);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TILE / 4 / THREADS; ++i)
    sum += __expf((held[i].x - largest) * scale) + __expf((held[i].y - largest) * scale) +
           __expf((held[i].z - largest) * scale) + __expf((held[i].w - largest) * scale);
  sum = reduce(sum, false);
  if (threadIdx.x == 0) out[int64_t(row) * gridDim.y + tile] = make_float2(largest, sum);
}

__device__ Law combine(const float2* tiles, int count, float scale) {
  float largest = -INFINITY, sum = 0.0f;
  for (int i = 0; i < count; ++i) largest = fmaxf(largest, tiles[i].x);
  for (int i = 0; i < count; ++i) sum += tiles[i].y * __expf((tiles[i].x - largest) * scale);
  return {largest, __logf(sum)};
}

struct Request {
  const float *target, *draft;
  const float2 *target_tiles, *draft_tiles;
  int accepted;
  Law p, q;
};

__device__ Request scan(const float2* tiles, const float* target, const float* draft,
                        const int64_t* tokens, const double* coins, int batch, int gamma, int vocab,
                        int count, float scale) {
  const int b = blockIdx.x;
  Request r{target + int64_t(b) * (gamma + 1) * vocab,
            draft + int64_t(b) * gamma * vocab,
            tiles + int64_t(b) * (gamma + 1) * count,
            tiles + (int64_t(batch) * (gamma + 1) + int64_t(b) * gamma) * count,
            0,
            {},
            {}};
  for (;; ++r.accepted) {
    const int n = r.accepted;
    r.p = combine(r.target_tiles + n * count, count, scale);
    if (n == gamma) return r;
    r.q = combine(r.draft_tiles + n * count, count, scale);
    const int64_t y = tokens[b * gamma + n];
    const float p = __expf((r.target[int64_t(n) * vocab + y] - r.p.max) * scale - r.p.log_sum);
    const float q = __expf((r.draft[int64_t(n) * vocab + y] - r.q.max) * scale - r.q.log_sum);
    if (!(coins[b * gamma + n] * q < p)) return r;
  }
}

__device__ float residual(const Request& r, int gamma, int vocab, int id, float scale) {
  const int n = r.accepted;
  if (id >= vocab) return 0.0f;
  const float p = __expf((r.target[int64_t(n) * vocab + id] - r.p.max) * scale - r.p.log_sum);
  if (n == gamma) return p;
  return p - __expf((r.draft[int64_t(n) * vocab + id] - r.q.max) * scale - r.q.log_sum);
}

__global__ void masses(float* out, const float2* tiles, const float* target, const float* draft,
                       const int64_t* tokens, const double* coins, int batch, int gamma, int vocab,
                       float scale) {
  const Request r =
      scan(tiles, target, draft, tokens, coins, batch, gamma, vocab, gridDim.y, scale);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < TILE; i += THREADS)
    sum += fmaxf(residual(r, gamma, vocab, blockIdx.y * TILE + i, scale), 0.0f);
  sum = reduce(sum, false);
  if (threadIdx.x == 0) out[int64_t(blockIdx.x) * gridDim.y + blockIdx.y] = sum;
}

__global__ void decide(int64_t* out, const float* tile_masses, const float2* tiles,
                       const float* target, const float* draft, const int64_t* tokens,
                       const double* coins, const double* final_coins, int batch, int gamma,
                       int vocab, int count, float scale) {
  const Request r = scan(tiles, target, draft, tokens, coins, batch, gamma, vocab, count, scale);
  const float* mine = tile_masses + int64_t(blockIdx.x) * count;
  double total = 0.0;
  for (int i = 0; i < count; ++i) total += mine[i];
  double left = final_coins[blockIdx.x] * total;
  int tile = 0;
  while (tile + 1 < count && left >= mine[tile]) left -= mine[tile++];
  // a thread owns TILE / THREADS neighbouring ids; prefix sums over threads, then inside one
  __shared__ double before[THREADS + 1];
  constexpr int OWN = TILE / THREADS;
  const int first = tile * TILE + threadIdx.x * OWN;
  double own = 0.0;
  for (int i = 0; i < OWN; ++i)
    own += fmaxf(residual(r, gamma, vocab, first + i, scale), 0.0f);
  before[threadIdx.x + 1] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    before[0] = 0.0;
    for (int i = 1; i <= THREADS; ++i) before[i] += before[i - 1];
  }
  __syncthreads();
  left = fmin(left, before[THREADS] * (1.0 - 1e-15));  // float32 sums of two orders may differ
  if (!(before[threadIdx.x] <= left && left < before[threadIdx.x + 1])) return;
  left -= before[threadIdx.x];
  int64_t last = first;
  for (int i = 0; i < OWN; ++i) {
    const float mass = residual(r, gamma, vocab, first + i, scale);
    if (mass <= 0.0f) continue;
    last = first + i;
    if (left < mass) break;
    left -= mass;
  }
  int64_t* row = out + int64_t(blockIdx.x) * (gamma + 1);
  for (int i = 0; i <= gamma; ++i)
    row[i] = i < r.accepted ? tokens[blockIdx.x * gamma + i] : i == r.accepted ? last : -1;
}

}  // namespace

// Scratch: tiles [batch * (2 gamma + 1), ceil(vocab / 8192)] float2, masses [batch, same] float.
extern "C" void accept_token_cuda(int64_t* out, float* scratch_tiles, float* scratch_masses,
                                  const float* target, const float* draft, const int64_t* tokens,
                                  const double* accept_coins, const double* final_coins, int batch,
                                  int gamma, int vocab, float inv_temperature) {
  const int count = (vocab + TILE - 1) / TILE;
  float2* tiles = reinterpret_cast<float2*>(scratch_tiles);
  statistics<<<dim3(batch * (2 * gamma + 1), count), THREADS>>>(
      tiles, target, draft, batch * (gamma + 1), vocab, inv_temperature);
  masses<<<dim3(batch, count), THREADS>>>(scratch_masses, tiles, target, draft, tokens,
                                          accept_coins, batch, gamma, vocab, inv_temperature);
  decide<<<batch, THREADS>>>(out, scratch_masses, tiles, target, draft, tokens, accept_coins,
                             final_coins, batch, gamma, vocab, count, inv_temperature);
}
