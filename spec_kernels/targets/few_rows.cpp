// Products of few rows with a weight matrix: each weight is read once, and used for all rows; and
// the norms between such products, for which torch takes eight small operations.
// Eight lanes at a time; sums are float32, whatever the numbers are. Built by few_rows.py.
//
// Weights are loaded 32 bytes at a time. Eight are float32 lanes as they are. Sixteen in bfloat16
// are eight words; a bfloat16 is the upper half of a float32, so a shift and a mask make the lanes
// of the numbers in even and in odd places. Inputs are laid out likewise before the loop.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __FMA__
#include <immintrin.h>
#endif

typedef float Lanes __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(32), aligned(2)));

template <typename Number>
constexpr int lanes = 32 / sizeof(Number);

template <typename Number>
constexpr int vectors = sizeof(float) / sizeof(Number);

static inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

static inline Lanes load(const float* from, int) { return load(from); }

static inline Lanes load(const uint16_t* from, int vector) {
  Words pairs = *reinterpret_cast<const Words*>(from);
  return reinterpret_cast<Lanes>(vector == 0 ? pairs << 16 : pairs & 0xffff0000);
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

// In one rounding where there is such an instruction; the compiler is told not to choose by itself.
static inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, sum);
#else
  return sum + a * b;
#endif
}

// Keeps a vector that is used several times in a register: left to itself the compiler loads it for
// each use, and loads are as scarce as products.
static inline void hold(Lanes& x) {
#ifdef __FMA__
  asm("" : "+x"(x));
#endif
}

static inline float total(Lanes x) {
#ifdef __FMA__
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}

// Some outputs of `rows` rows; x is [rows, inputs], y is [rows, outputs] from the first of them on.
// On the way it asks for weights that are used later, a part of a line (`step`) at a time.
template <int rows, int columns, typename Number>
static void tile(const Number* weight, const float* x, Number* y, int64_t outputs, int64_t inputs,
                 const Number* next, int64_t step) {
  Lanes sums[columns][rows] = {};
  int64_t whole = inputs / lanes<Number> * lanes<Number>;
  for (int64_t i = 0; i < whole; i += lanes<Number>) {
    __builtin_prefetch(next, 0, 2);
    next += step;
    for (int vector = 0; vector < vectors<Number>; ++vector) {
      Lanes weights[columns];
      for (int column = 0; column < columns; ++column) {
        weights[column] = load(weight + column * inputs + i, vector);
        hold(weights[column]);
      }
      for (int row = 0; row < rows; ++row) {
        Lanes numbers = load(x + row * inputs + i + 8 * vector);
        if (columns > 1) hold(numbers);
        for (int column = 0; column < columns; ++column)
          sums[column][row] = multiply_add(weights[column], numbers, sums[column][row]);
      }
    }
  }
#pragma GCC unroll 8
  for (int column = 0; column < columns; ++column)
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      float sum = total(sums[column][row]);
      for (int64_t i = whole; i < inputs; ++i)
        sum += widen(weight[column * inputs + i]) * x[row * inputs + i];
      store(sum, y + row * outputs + column);
    }
}

// What a tile adds up fits into the registers. More rows take parts, each all outputs of a chunk:
// the numbers of a part stay in a core's first cache, the weights of a chunk in its second one. All
// tiles of a chunk together ask for the weights of the next, in the order of the memory.
constexpr int most_rows = 6;
constexpr int most_columns = 2;

template <int rows, int columns, typename Number>
static void tile_of(int wanted, const Number* weight, const float* x, Number* y, int64_t outputs,
                    int64_t inputs, const Number* next, int64_t step) {
  if constexpr (rows > 1)
    if (wanted < rows)
      return tile_of<rows - 1, columns>(wanted, weight, x, y, outputs, inputs, next, step);
  tile<rows, columns>(weight, x, y, outputs, inputs, next, step);
}

struct alignas(64) Line {
  float numbers[16];
};

template <typename Number>
static void multiply(const Number* weight, const Number* x, Number* y, int64_t outputs,
                     int64_t inputs, int64_t rows, int threads) {
  static thread_local std::vector<Line> lines;
  lines.resize(rows * inputs / 16 + 1);
  float* wide = lines.data()->numbers;
  int64_t whole = inputs / lanes<Number> * lanes<Number>;
  for (int64_t row = 0; row < rows; ++row) {
    const Number* from = x + row * inputs;
    float* to = wide + row * inputs;
    for (int64_t i = 0; i < whole; i += lanes<Number>)
      for (int vector = 0; vector < vectors<Number>; ++vector)
        *reinterpret_cast<Lanes*>(to + i + 8 * vector) = load(from + i, vector);
    for (int64_t i = whole; i < inputs; ++i) to[i] = widen(from[i]);
  }
  int64_t parts = (rows + most_rows - 1) / most_rows, size = (rows + parts - 1) / parts;
  int64_t chunk = (parts == 1 ? 2 : 6) * most_columns;
  int64_t steps = inputs / lanes<Number>, step = (lanes<Number> * most_columns + parts - 1) / parts;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t begin = 0; begin < outputs; begin += chunk) {
    const Number* next = weight + (begin + chunk) * inputs;
    int64_t end = begin + chunk < outputs ? begin + chunk : outputs;
    for (int64_t row = 0; row < rows; row += size)
      for (int64_t output = begin; output < end; output += most_columns) {
        auto call = output + 1 < outputs ? tile_of<most_rows, most_columns, Number>
                                         : tile_of<most_rows, 1, Number>;
        call(rows - row < size ? rows - row : size, weight + output * inputs, wide + row * inputs,
             y + row * outputs + output, outputs, inputs, next, step);
        next += steps * step;
      }
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
template <typename Number>
static void normalise(const Number* weight, const Number* x, Number* y, int64_t size, int64_t rows,
                      float eps) {
  int64_t whole = size / lanes<Number> * lanes<Number>;
  for (int64_t row = 0; row < rows; ++row, x += size, y += size) {
    Lanes sums = {};
    for (int64_t i = 0; i < whole; i += lanes<Number>)
      for (int vector = 0; vector < vectors<Number>; ++vector) {
        Lanes numbers = load(x + i, vector);
        sums = multiply_add(numbers, numbers, sums);
      }
    float sum = total(sums);
    for (int64_t i = whole; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / std::sqrt(sum / size + eps);
    for (int64_t i = 0; i < size; ++i) store(widen(x[i]) * scale * widen(weight[i]), y + i);
  }
}

extern "C" {
void normalise_float32(const float* weight, const float* x, float* y, int64_t size, int64_t rows,
                       float eps) {
  normalise(weight, x, y, size, rows, eps);
}
void normalise_bfloat16(const uint16_t* weight, const uint16_t* x, uint16_t* y, int64_t size,
                        int64_t rows, float eps) {
  normalise(weight, x, y, size, rows, eps);
}
void multiply_float32(const float* weight, const float* x, float* y, int64_t outputs,
                      int64_t inputs, int64_t rows, int threads) {
  multiply(weight, x, y, outputs, inputs, rows, threads);
}
void multiply_bfloat16(const uint16_t* weight, const uint16_t* x, uint16_t* y, int64_t outputs,
                       int64_t inputs, int64_t rows, int threads) {
  multiply(weight, x, y, outputs, inputs, rows, threads);
}
}
