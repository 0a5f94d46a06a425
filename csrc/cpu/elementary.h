// Elementary functions of whole vectors, within a few units in the last place. Those that few messages
// use, and most in double, are libm's for each number.
#pragma once
#include <cmath>

#include "softmax.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename Acc>
constexpr int kWidth = kLanes<Acc>;
template <typename Acc>
using V = Vec<Acc, kWidth<Acc>>;
template <typename Acc>
using M = Vec<mask_t<Acc>, kWidth<Acc>>;

template <typename Acc>
PYG_FAST_INLINE V<Acc> all(Acc a) {
  return splat<kWidth<Acc>>(a);
}

template <typename Acc, typename F>
PYG_FAST_INLINE V<Acc> by_lane(V<Acc> v, const F& f) {
  for (int k = 0; k < kWidth<Acc>; ++k) v[k] = f(v[k]);
  return v;
}

template <int W>
PYG_FAST_INLINE bool any_of(Vec<int64_t, W> mask) {
  if constexpr (W == 2) {
    return (mask[0] | mask[1]) != 0;
  } else {
    Vec<int64_t, W / 2> half[2];
    __builtin_memcpy(half, &mask, sizeof(mask));
    return any_of<W / 2>(half[0] | half[1]);
  }
}

// `out`, but f(k) in each lane k of the mask: for what vectors cannot compute, which is rare.
template <typename Acc, typename F>
PYG_FAST_INLINE V<Acc> mended(V<Acc> out, M<Acc> mask, const F& f) {
  if (!any_of<sizeof(mask) / 8>(bit_cast<Vec<int64_t, sizeof(mask) / 8>>(mask))) return out;
  for (int k = 0; k < kWidth<Acc>; ++k) {
    if (mask[k] != 0) out[k] = f(k);
  }
  return out;
}

// f of the numbers in double, which has twice the digits.
template <typename F, typename... X>
PYG_FAST_INLINE V<float> in_double(const F& f, X... x) {
  constexpr int kHalf = kWidth<double>;
  struct Halves {
    Vec<float, kHalf> part[2];
  };
  const auto half = [&](auto v, int k) PYG_FAST_ALWAYS {
    return __builtin_convertvector(bit_cast<Halves>(v).part[k], V<double>);
  };
  Halves out;
  PYG_FAST_UNROLL
  for (int k = 0; k < 2; ++k) {
    out.part[k] = __builtin_convertvector(f(half(x, k)...), Vec<float, kHalf>);
  }
  return bit_cast<V<float>>(out);
}

template <typename Acc>
PYG_FAST_INLINE V<Acc> abs_of(V<Acc> x) {
  return bit_cast<V<Acc>>(bit_cast<M<Acc>>(x) & ~(M<Acc>{} + kLeast<mask_t<Acc>>));
}

template <typename Acc>
PYG_FAST_INLINE V<Acc> sqrt_of(V<Acc> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Acc) == 4) {
    return bit_cast<V<Acc>>(_mm512_maskz_sqrt_ps(0xffff, bit_cast<__m512>(v)));
  } else {
    return bit_cast<V<Acc>>(_mm512_maskz_sqrt_pd(0xff, bit_cast<__m512d>(v)));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(Acc) == 4) {
    return bit_cast<V<Acc>>(_mm256_sqrt_ps(bit_cast<__m256>(v)));
  } else {
    return bit_cast<V<Acc>>(_mm256_sqrt_pd(bit_cast<__m256d>(v)));
  }
#else
  return by_lane<Acc>(v, [](Acc a) { return std::sqrt(a); });
#endif
}

// The natural logarithm: Cephes' polynomial on [sqrt(1/2), sqrt(2)] in float, a series in double.
PYG_FAST_INLINE V<float> log_of(V<float> x) {
  using F = V<float>;
  using I = M<float>;
  const I tiny = x < 0x1p-126f;
  const F scaled = tiny != 0 ? x * 0x1p25f : x;
  const I bits = bit_cast<I>(scaled);
  I exponent = ((bits - 0x3f3504f3) >> 23);
  F m = bit_cast<F>(bits - (exponent << 23)) - 1.0f;
  exponent = tiny != 0 ? exponent - 25 : exponent;
  const F e = __builtin_convertvector(exponent, F);
  const F z = m * m;
  F y = m * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z + e * -2.12194440e-4f - z * 0.5f;
  F out = m + y + e * 0.693359375f;
  const float inf = __builtin_inff();
  out = x == inf ? x : out;
  out = x == 0.0f ? all<float>(-inf) : out;
  return x < 0.0f || x != x ? all<float>(__builtin_nanf("")) : out;
}

// 2 artanh((m - 1) / (m + 1)) on [sqrt(1/2), sqrt(2)], of positive normal numbers.
PYG_FAST_INLINE V<double> log_of_normal(V<double> x) {
  using Bits = M<double>;
  const Bits bits = bit_cast<Bits>(x);
  const Bits exponent = (bits - 0x3fe6a09e667f3bcd) >> 52;
  const auto m = bit_cast<V<double>>(bits - (exponent << 52));
  const auto e = bit_cast<V<double>>(exponent + 0x4338000000000000) - 0x1.8p52;
  const auto s = (m - 1) / (m + 1), z = s * s;
  auto sum = all<double>(2.0 / 21);
  PYG_FAST_UNROLL
  for (int k = 19; k > 1; k -= 2) sum = sum * z + 2.0 / k;
  return e * ExpOf<double>::kLn2High + (2 * s + (s * z * sum + e * ExpOf<double>::kLn2Low));
}

PYG_FAST_INLINE V<double> log_of(V<double> x) {
  const M<double> rare = ~(x >= 0x1p-1022 && x < __builtin_inf());
  return mended<double>(log_of_normal(rare ? all<double>(1) : x), rare,
                        [&](int k) PYG_FAST_ALWAYS { return std::log(x[k]); });
}

// Of logarithms to other bases, of float in double, so that those of powers are whole numbers.
PYG_FAST_INLINE V<float> log_of(V<float> x, double per_log, float (*by_number)(float)) {
  const M<float> rare = ~(x > 0.0f && x < __builtin_inff());
  const V<float> out =
      in_double([=](V<double> v) PYG_FAST_ALWAYS { return log_of_normal(v) * per_log; },
                rare ? all<float>(1) : x);
  return mended<float>(out, rare, [&](int k) PYG_FAST_ALWAYS { return by_number(x[k]); });
}
PYG_FAST_INLINE V<float> log2_of(V<float> x) { return log_of(x, 0x1.71547652b82fep0, std::log2); }
PYG_FAST_INLINE V<double> log2_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::log2(a); });
}
PYG_FAST_INLINE V<float> log10_of(V<float> x) {
  return log_of(x, 0x1.bcb7b1526e50ep-2, std::log10);
}
PYG_FAST_INLINE V<double> log10_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::log10(a); });
}

PYG_FAST_INLINE V<float> log1p_of(V<float> x) {
  const V<float> u = x + 1.0f, lost = x - (u - 1.0f);
  const V<float> out = log_of(u) + lost / u;
  return u == __builtin_inff() || u == 0.0f ? log_of(u) : out;
}
PYG_FAST_INLINE V<double> log1p_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::log1p(a); });
}

PYG_FAST_INLINE V<float> expm1_of(V<float> x) {
  V<float> near = all<float>(1.0f / 40320);  // the series up to x^8
  near = near * x + 1.0f / 5040;
  near = near * x + 1.0f / 720;
  near = near * x + 1.0f / 120;
  near = near * x + 1.0f / 24;
  near = near * x + 1.0f / 6;
  near = near * x + 0.5f;
  near = near * x * x + x;
  const V<float> far = exp_of<float, kWidth<float>>(x) - 1.0f;
  return x > -0.5f && x < 0.5f ? near : far;
}
PYG_FAST_INLINE V<double> expm1_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::expm1(a); });
}

PYG_FAST_INLINE V<float> tanh_of(V<float> x) {
  const V<float> z = x * x;
  V<float> near = z * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * z - 5.37397155531e-2f;
  near = near * z + 1.33314422036e-1f;
  near = near * z - 3.33332819422e-1f;
  near = near * z * x + x;
  const V<float> size = x < 0 ? -x : x;
  const V<float> far = 1.0f - 2.0f / (exp_of<float, kWidth<float>>(size + size) + 1.0f);
  return size < 0.625f ? near : (x < 0 ? -far : far);
}
PYG_FAST_INLINE V<double> tanh_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::tanh(a); });
}

// x P(x^2) / Q(x^2) within four units in the last place, on [-4, 4]; farther away erf is 1 in float.
PYG_FAST_INLINE V<float> erf_of(V<float> x) {
  const V<float> bounded = x > 4.0f ? all<float>(4.0f) : (x < -4.0f ? all<float>(-4.0f) : x);
  const V<float> z = bounded * bounded;
  V<float> p = z * -2.72614225801306e-10f + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  V<float> q = z * -1.45660718464996e-05f - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  return bounded * p / q;
}
PYG_FAST_INLINE V<double> erf_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::erf(a); });
}

PYG_FAST_INLINE V<float> exp2_of(V<float> x) {
  const M<float> normal = ~(x < -126.0f);  // also true for NaN
  x = x < -126.0f ? all<float>(-126) : (x > 128.0f ? all<float>(128) : x);
  const V<float> rounded = x + ExpOf<float>::kRound;  // the low bits hold the integer
  const V<float> part = x - (rounded - ExpOf<float>::kRound);
  const M<float> n = bit_cast<M<float>>(rounded) - 0x4b400000, half = n >> 1;
  const auto power = [](M<float> k) PYG_FAST_ALWAYS { return bit_cast<V<float>>((k + 127) << 23); };
  const V<float> out =
      exp_of<float, kWidth<float>>(part * 0x1.62e43p-1f) * power(half) * power(n - half);
  return masked<float, kWidth<float>>(out, normal);
}
PYG_FAST_INLINE V<double> exp2_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::exp2(a); });
}

PYG_FAST_INLINE V<float> pow_of(V<float> a, V<float> b) {
  const float inf = __builtin_inff();
  const M<float> rare = ~(a > 0.0f && a < inf && b > -inf && b < inf);
  const V<float> out = in_double(
      [](V<double> x, V<double> y)
          PYG_FAST_ALWAYS { return exp_of<double, kWidth<double>>(y * log_of_normal(x)); },
      rare ? all<float>(1) : a, rare ? all<float>(1) : b);
  return mended<float>(out, rare, [&](int k) PYG_FAST_ALWAYS { return std::pow(a[k], b[k]); });
}
PYG_FAST_INLINE V<double> pow_of(V<double> a, V<double> b) {
  for (int k = 0; k < kWidth<double>; ++k) a[k] = std::pow(a[k], b[k]);
  return a;
}

// x - n pi / 2: all parts of pi / 2 but the last are exact times integers.
PYG_FAST_INLINE V<float> remainder_of(V<float> x, V<float> n) {
  using Wide = Vec<double, kWidth<float>>;
  const Wide y = __builtin_convertvector(x, Wide), m = __builtin_convertvector(n, Wide);
  return __builtin_convertvector(y - m * 0x1.921fb544p0 - m * 0x1.0b4611a626331p-34, V<float>);
}
PYG_FAST_INLINE V<double> remainder_of(V<double> x, V<double> n) {
  const V<double> first = x - n * 0x1.921fb544p0, part = n * 0x1.0b4611a6p-34;
  const V<double> second = first - part;
  return second - (n * 0x1.3198a2e037073p-69 - ((first - second) - part));
}

// sin(x + turn pi / 2) of the remainder of x: series up to r^kTerms.
template <typename Acc>
PYG_FAST_INLINE V<Acc> sin_of_remainder(V<Acc> r, M<Acc> quadrant, int turn) {
  constexpr int kTerms = sizeof(Acc) == 4 ? 10 : 18;
  const V<Acc> z = r * r;
  V<Acc> sine = all<Acc>(1), cosine = all<Acc>(1);
  PYG_FAST_UNROLL
  for (int k = kTerms; k > 0; k -= 2) {
    cosine = 1 - z * cosine * (Acc{1} / static_cast<Acc>(k * (k - 1)));
    if (k > 2) sine = 1 - z * sine * (Acc{1} / static_cast<Acc>((k - 1) * (k - 2)));
  }
  quadrant += turn;
  const V<Acc> out = (quadrant & 1) != 0 ? cosine : r * sine;
  return (quadrant & 2) != 0 ? -out : out;
}

template <typename Acc, typename F>
PYG_FAST_INLINE V<Acc> sin_of(V<Acc> x, int turn, const F& by_number) {
  // Farther away the parts of pi / 2 times n are not exact.
  const M<Acc> rare = ~(abs_of<Acc>(x) < static_cast<Acc>(0x1p20));
  const V<Acc> near = rare ? V<Acc>{} : x;
  const V<Acc> rounded = near * static_cast<Acc>(0x1.45f306dc9c883p-1) + ExpOf<Acc>::kRound;
  const V<Acc> n = rounded - ExpOf<Acc>::kRound;
  const V<Acc> r = remainder_of(near, n);
  return mended<Acc>(sin_of_remainder<Acc>(r, bit_cast<M<Acc>>(rounded), turn), rare,
                     [&](int k) PYG_FAST_ALWAYS { return by_number(x[k]); });
}
template <typename Acc>
PYG_FAST_INLINE V<Acc> sin_of(V<Acc> x) {
  return sin_of<Acc>(x, 0, [](Acc a) { return std::sin(a); });
}
template <typename Acc>
PYG_FAST_INLINE V<Acc> cos_of(V<Acc> x) {
  return sin_of<Acc>(x, 1, [](Acc a) { return std::cos(a); });
}

constexpr float kPi = 0x1.921fb6p1f;

PYG_FAST_INLINE V<float> with_sign_of(V<float> size, V<float> x) {
  return bit_cast<V<float>>(bit_cast<M<float>>(size) | (bit_cast<M<float>>(x) & kLeast<int32_t>));
}

// Cephes' polynomials on [0, tan(pi / 8)].
PYG_FAST_INLINE V<float> atan_of_part(V<float> x) {
  const V<float> far = (x - 1) / (x + 1), t = x > 0.41421356f ? far : x, z = t * t;
  V<float> y = z * 8.05374449538e-2f - 1.38776856032e-1f;
  y = y * z + 1.99777106478e-1f;
  y = y * z - 3.33329491539e-1f;
  y = y * z * t + t;
  return x > 0.41421356f ? y + kPi / 4 : y;
}
PYG_FAST_INLINE V<float> atan_of(V<float> x) {
  const V<float> size = abs_of<float>(x);
  const V<float> part = atan_of_part(size > 1 ? 1 / size : size);
  return with_sign_of(size > 1 ? kPi / 2 - part : part, x);
}
PYG_FAST_INLINE V<double> atan_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::atan(a); });
}

PYG_FAST_INLINE V<float> atan2_of(V<float> y, V<float> x) {
  const V<float> a = abs_of<float>(y), b = abs_of<float>(x);
  const V<float> most = a > b ? a : b, least = a > b ? b : a;
  const M<float> rare = ~(most > 0.0f && most < __builtin_inff() && least >= 0.0f);
  V<float> out = atan_of_part(least / most);
  out = a > b ? kPi / 2 - out : out;
  out = with_sign_of(x < 0 ? kPi - out : out, y);
  return mended<float>(out, rare, [&](int k) PYG_FAST_ALWAYS { return std::atan2(y[k], x[k]); });
}
PYG_FAST_INLINE V<double> atan2_of(V<double> y, V<double> x) {
  for (int k = 0; k < kWidth<double>; ++k) y[k] = std::atan2(y[k], x[k]);
  return y;
}

// The arc sine of |x|, or, above 1/2, half of the arc cosine.
PYG_FAST_INLINE V<float> asin_of_part(V<float> size) {
  const V<float> z = size > 0.5f ? (1 - size) * 0.5f : size * size;
  const V<float> t = size > 0.5f ? sqrt_of<float>(z) : size;
  V<float> y = z * 4.2163199048e-2f + 2.4181311049e-2f;
  y = y * z + 4.5470025998e-2f;
  y = y * z + 7.4953002686e-2f;
  y = y * z + 1.6666752422e-1f;
  return y * z * t + t;
}
PYG_FAST_INLINE V<float> asin_of(V<float> x) {
  const V<float> size = abs_of<float>(x), part = asin_of_part(size);
  return with_sign_of(size > 0.5f ? kPi / 2 - 2 * part : part, x);
}
PYG_FAST_INLINE V<double> asin_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::asin(a); });
}
PYG_FAST_INLINE V<float> acos_of(V<float> x) {
  const V<float> size = abs_of<float>(x), part = asin_of_part(size);
  const V<float> far = x < 0 ? kPi - 2 * part : 2 * part;
  return size > 0.5f ? far : kPi / 2 - with_sign_of(part, x);
}
PYG_FAST_INLINE V<double> acos_of(V<double> x) {
  return by_lane<double>(x, [](double a) { return std::acos(a); });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
