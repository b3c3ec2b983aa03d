// The floor of cache compaction: rows move inside one layer's cache, staged in registers.

#include <cstdint>

namespace {

constexpr int THREADS = 256;
constexpr int MOST_ROWS = 16;  // kept nodes of a request

// Block (request, slice of a row). Every thread reads its word of all rows, then writes them: the
// slices of other threads are disjoint, so no order between threads matters.
__global__ void compact_kernel(float4* cache, const int32_t* context_lens, const int32_t* path,
                               const int32_t* accepted_lens, int64_t stride_request,
                               int64_t row_words, int max_depth) {
  const int request = blockIdx.x;
  const int64_t word = int64_t(blockIdx.y) * THREADS + threadIdx.x;
  if (word >= row_words) return;
  const int kept = accepted_lens[request] + 1;
  float4* rows = cache + request * stride_request + context_lens[request] * row_words + word;
  float4 held[MOST_ROWS];
#pragma unroll
  for (int i = 0; i < MOST_ROWS; ++i)
    if (i < kept) held[i] = rows[path[request * (max_depth + 1) + i] * row_words];
#pragma unroll
  for (int i = 0; i < MOST_ROWS; ++i)
    if (i < kept && path[request * (max_depth + 1) + i] != i) rows[i * row_words] = held[i];
}

}  // namespace

// Cache [batch, capacity, row] of one layer, rows of a multiple of 16 bytes; at most 16 kept nodes.
extern "C" void compact_cache_cuda(char* cache, const int32_t* context_lens, const int32_t* path,
                                   const int32_t* accepted_lens, int batch, int64_t capacity,
                                   int64_t row_bytes, int max_depth) {
  const int64_t words = row_bytes / 16;
  const dim3 grid(batch, static_cast<unsigned>((words + THREADS - 1) / THREADS));
  compact_kernel<<<grid, THREADS>>>(reinterpret_cast<float4*>(cache), context_lens, path,
                                    accepted_lens, capacity * words, words, max_depth);
}
