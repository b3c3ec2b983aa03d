// What the memory of this GPU gives: read, copy and gather ceilings. Launched on the default stream.

#include <cstdint>

namespace {

constexpr int THREADS = 256;

__global__ void read_kernel(float* out, const float4* source, int64_t count) {
  float total = 0.0f;
  const int64_t stride = int64_t(gridDim.x) * THREADS;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
    const float4 x = source[i];
    total += x.x + x.y + x.z + x.w;
  }
  if (total == 1.2345e30f) *out = total;  // never: keeps the reads
}

__global__ void copy_kernel(float4* target, const float4* source, int64_t count) {
  const int64_t stride = int64_t(gridDim.x) * THREADS;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride)
    target[i] = source[i];
}

__global__ void gather_kernel(float4* target, const float4* source, const int64_t* index,
                              int64_t row_words) {
  const int64_t row = blockIdx.x;
  const float4* from = source + index[row] * row_words;
  for (int64_t i = threadIdx.x; i < row_words; i += THREADS) target[row * row_words + i] = from[i];
}

}  // namespace

// `count` floats, a multiple of 4.
extern "C" void read_all_cuda(float* out, const float* source, int64_t count, int blocks) {
  read_kernel<<<blocks, THREADS>>>(out, reinterpret_cast<const float4*>(source), count / 4);
}

extern "C" void copy_all_cuda(float* target, const float* source, int64_t count, int blocks) {
  copy_kernel<<<blocks, THREADS>>>(reinterpret_cast<float4*>(target),
                                   reinterpret_cast<const float4*>(source), count / 4);
}

// Rows of `row_bytes` bytes, a multiple of 16.
extern "C" void gather_rows_cuda(char* target, const char* source, const int64_t* index,
                                 int64_t rows, int64_t row_bytes) {
  gather_kernel<<<static_cast<unsigned>(rows), THREADS>>>(reinterpret_cast<float4*>(target),
                                                          reinterpret_cast<const float4*>(source),
                                                          index, row_bytes / 16);
}
