// Products of few rows with a weight matrix: each weight is read once, and used for all rows.
// Eight lanes at a time; sums are float32, whatever the numbers are. Built by few_rows.py.
#include <cstdint>
#include <cstring>
#include <vector>

typedef float Lanes __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16), aligned(2)));

static inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

static inline Lanes load(const uint16_t* from) {  // bfloat16 is the upper half of a float32
  Halves halves = *reinterpret_cast<const Halves*>(from);
  return reinterpret_cast<Lanes>(__builtin_convertvector(halves, Words) << 16);
}

static inline float widen(float value) { return value; }

static inline float widen(uint16_t half) {
  uint32_t word = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

static inline void store(float value, float* to) { *to = value; }

// To nearest even. The sum of bfloat16 products is no NaN with low bits, which would carry over.
static inline void store(float value, uint16_t* to) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  *to = (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

// One output of `rows` rows; x is [rows, inputs], y is [rows, outputs] from the output's column on.
template <int rows, typename Number>
static void column(const Number* weight, const float* x, Number* y, int64_t outputs,
                   int64_t inputs) {
  Lanes sums[rows] = {};
  int64_t whole = inputs / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    Lanes weights = load(weight + i);
    for (int row = 0; row < rows; ++row) sums[row] += weights * load(x + row * inputs + i);
  }
  for (int row = 0; row < rows; ++row) {
    float sum = 0;
    for (int lane = 0; lane < 8; ++lane) sum += sums[row][lane];
    for (int64_t i = whole; i < inputs; ++i) sum += widen(weight[i]) * x[row * inputs + i];
    store(sum, y + row * outputs);
  }
}

// Rows in parts that leave the sums in registers; for the second part on, weights are in the cache.
constexpr int most = 12;

template <int rows, typename Number>
static void columns(int wanted, const Number* weight, const float* x, Number* y, int64_t outputs,
                    int64_t inputs) {
  if constexpr (rows > 1)
    if (wanted < rows) return columns<rows - 1>(wanted, weight, x, y, outputs, inputs);
  column<rows>(weight, x, y, outputs, inputs);
}

template <typename Number>
static void multiply(const Number* weight, const Number* x, Number* y, int64_t outputs,
                     int64_t inputs, int64_t rows, int threads) {
  static thread_local std::vector<float> wide;
  wide.resize(rows * inputs);
  for (int64_t i = 0; i < rows * inputs; ++i) wide[i] = widen(x[i]);
  const float* from = wide.data();
  int64_t parts = (rows + most - 1) / most, size = (rows + parts - 1) / parts;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t output = 0; output < outputs; ++output)
    for (int64_t row = 0; row < rows; row += size)
      columns<most>(rows - row < size ? rows - row : size, weight + output * inputs,
                    from + row * inputs, y + row * outputs + output, outputs, inputs);
}

extern "C" {
void multiply_float32(const float* weight, const float* x, float* y, int64_t outputs,
                      int64_t inputs, int64_t rows, int threads) {
  multiply(weight, x, y, outputs, inputs, rows, threads);
}
void multiply_bfloat16(const uint16_t* weight, const uint16_t* x, uint16_t* y, int64_t outputs,
                       int64_t inputs, int64_t rows, int threads) {
  multiply(weight, x, y, outputs, inputs, rows, threads);
}
}
