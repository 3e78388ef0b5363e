// Attention of one new token a row: bf16 keys and values of (rows, heads, positions, 64), each row with a length of its own.
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int SIZE = 64;

static inline float widen(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

template <int SHARE>
static void head(const float* q, const uint16_t* k, const uint16_t* v, float* out, int length, float* scores, int stride) {
  for (int t = 0; t < length; t++) {
    float key[SIZE];
    for (int d = 0; d < SIZE; d++) key[d] = widen(k[t * SIZE + d]);
    for (int j = 0; j < SHARE; j++) {
      float sum = 0;
      for (int d = 0; d < SIZE; d++) sum += q[j * SIZE + d] * key[d];
      scores[j * stride + t] = sum;
    }
  }
  float total[SHARE], mixed[SHARE][SIZE] = {};
  for (int j = 0; j < SHARE; j++) {
    float* mine = scores + j * stride;
    float most = mine[0], all = 0;
    for (int t = 1; t < length; t++) most = mine[t] > most ? mine[t] : most;
    for (int t = 0; t < length; t++) mine[t] = expf(mine[t] - most);
    for (int t = 0; t < length; t++) all += mine[t];
    total[j] = 1 / all;
  }
  for (int t = 0; t < length; t++) {
    float value[SIZE];
    for (int d = 0; d < SIZE; d++) value[d] = widen(v[t * SIZE + d]);
    for (int j = 0; j < SHARE; j++) {
      float weight = scores[j * stride + t];
      for (int d = 0; d < SIZE; d++) mixed[j][d] += weight * value[d];
    }
  }
  for (int j = 0; j < SHARE; j++)
    for (int d = 0; d < SIZE; d++) out[j * SIZE + d] = mixed[j][d] * total[j];
}

extern "C" void attention(const float* q, const uint16_t* k, const uint16_t* v, float* out, const int64_t* at, float* scores,
                          int rows, int heads, int share, int positions) {
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < heads; h++) {
      int64_t i = int64_t(r) * heads + h, cache = i * positions * SIZE, first = i * share * SIZE;
      int length = int(at[r]) + 1;
      if (share == 3) head<3>(q + first, k + cache, v + cache, out + first, length, scores, positions);
      else for (int j = 0; j < share; j++)
        head<1>(q + first + j * SIZE, k + cache, v + cache, out + first + j * SIZE, length, scores, positions);
    }
}
