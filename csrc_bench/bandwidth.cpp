// What the memory of this machine gives: read, copy and gather ceilings.

#include <cstdint>
#include <cstring>

// Adds up `count` floats; the result keeps the compiler from leaving the reading out.
extern "C" float read_all(const float* source, int64_t count) {
  float total = 0.0f;
#pragma omp parallel for simd reduction(+ : total) schedule(static)
  for (int64_t i = 0; i < count; ++i) total += source[i];
  return total;
}

extern "C" void copy_all(float* target, const float* source, int64_t count) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < count; ++i) target[i] = source[i];
}

// target[i] = source[index[i]], rows of `row_bytes` bytes.
extern "C" void gather_rows(char* target, const char* source, const int64_t* index, int64_t rows,
                            int64_t row_bytes) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(target + i * row_bytes, source + index[i] * row_bytes, row_bytes);
}
