"""Operations of expression graphs (``variants/nodes.py``) that Triton's language lacks, or rounds in other ways.

Bools are int1, integers of up to 32 bits int32, float16 and bfloat16 float32, rounded after every operation. Functions
of float32 err by few units in the last place, and give at special values what the C library gives.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = [
    "absolute",
    "bfloat16_value",
    "element_offset",
    "exp",
    "exp2",
    "floor",
    "floor_divide",
    "log",
    "log2",
    "modulo",
    "number",
    "power",
    "remainder",
    "rounded_to_bfloat16",
    "sin",
    "tanh",
    "tanh_of_float64",
    "to_integer",
]

if triton.knobs.runtime.interpret:

    @triton.jit
    def fmod(a, b):
        """``a - b * trunc(a / b)``: exact in the interpreter, though not where Triton compiles it."""
        return a % b
else:
    fmod = libdevice.fmod  # which the interpreter does not have


# Integers.


@triton.jit
def floor_divide(a, b):
    """``a / b`` rounded toward minus infinity, of any integers: 0 divides like 1."""
    divisor = tl.where((b == 0) | (b == -1), 1, b)  # neither division is defined for all dividends
    quotient = a // divisor
    rest = a - quotient * divisor
    quotient -= ((rest != 0) & ((rest < 0) != (divisor < 0))).to(quotient.dtype)
    return tl.where(b == -1, 0 - a, quotient)


@triton.jit
def modulo(a, b):
    """``a - b * floor_divide(a, b)``."""
    return a - b * floor_divide(a, b)


@triton.jit
def to_integer(x, first, last, dtype: tl.constexpr):
    """A float without its fraction; ``first`` and ``last`` are the smallest and the largest that the dtype holds."""
    x = tl.where(x < last, x, last)
    return tl.where(x > first, x, first).to(dtype)


# Elements of captured tensors.


@triton.jit
def number(argument):
    """A size or stride from the form in which kernels are given it: see ``functions.py``."""
    return (argument >> 1) - 4294967296


@triton.jit
def element_offset(index, size, stride):
    """How far from the first element an index leads: negative ones count from the end, and all are clamped."""
    size = number(size)
    stride = number(stride)
    first = -size
    last = size - 1
    if index.dtype == tl.int32:  # in which a tile of indices takes half the registers
        first = tl.maximum(first, -2147483648).to(tl.int32)
        last = tl.minimum(last, 2147483647).to(tl.int32)
    index = tl.maximum(tl.minimum(index, last), first)
    return index.to(tl.int64) * stride + tl.where(index < 0, size * stride, 0)


# bfloat16, by its bits: Triton's interpreter converts it with other roundings.


@triton.jit
def bfloat16_value(bits):
    """The float32 of a bfloat16 that is given as int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_bfloat16(x):
    """The nearest bfloat16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


# Functions of float32. Triton's own take numbers next to 0 for 0 where they are compiled, or are approximations.


@triton.jit
def absolute(x):
    """``|x|`` of float32."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def floor(x):
    """The largest integer that is not above a float32."""
    whole = tl.floor(x)
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def sin(x):
    """Of float32."""
    return tl.where(absolute(x) < 0.000244140625, x, tl.sin(x))


# Exponentials and logarithms are as in the CPU backend's functions.h. The two parts of ln(2) have few bits, so that
# products are exact.


@triton.jit
def split_at_integer(x):
    """The nearest integer as a float and as int32, for ``|x| < 2**22``: a large number leaves it in the low bits."""
    shifted = x + 12582912.0
    return shifted - 12582912.0, shifted.to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def power_of_two(n):
    """``2**n`` for int32 n from -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def beyond_ln2(x, n):
    """``x - n * ln(2)``."""
    return (x - n * 0.693359375) - n * -2.12194440e-4


@triton.jit
def expm1_near_0(r):
    """``exp(r) - 1`` for ``|r| <= ln(2) / 2``; the polynomial is the minimax one of its degree."""
    polynomial = (((1.3898391e-3 * r + 8.3666863e-3) * r + 4.1666862e-2) * r + 1.6666543e-1) * r + 0.5
    return r * r * polynomial + r


@triton.jit
def scaled_exp(r, n):
    """``exp(r) * 2**n`` in two steps, since ``2**n`` itself may be too large or small."""
    half = n >> 1
    return (expm1_near_0(r) + 1.0) * power_of_two(half) * power_of_two(n - half)


@triton.jit
def exp(x):
    """``e**x`` of float32."""
    x = tl.where(x < -104.0, -104.0, x)  # beyond these limits it is 0 or infinity
    x = tl.where(x > 89.0, 89.0, x)
    n, integer = split_at_integer(x * 1.4426950408889634)
    return scaled_exp(beyond_ln2(x, n), integer)


@triton.jit
def exp2(x):
    """``2**x`` of float32."""
    x = tl.where(x < -151.0, -151.0, x)
    x = tl.where(x > 129.0, 129.0, x)
    n, integer = split_at_integer(x)
    return scaled_exp((x - n) * 0.6931471805599453, integer)


@triton.jit
def with_sign_of(x, magnitude):
    """A float32 with another's sign, that of zeros included."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tanh(x):
    """Of float32."""
    # Of |x|: u / (u + 2) with u = exp(2 |x|) - 1, which loses no digits near 0, and is 1 from 9.02 on.
    magnitude = absolute(x)
    twice = 2.0 * tl.where(magnitude > 10.0, 10.0, magnitude)
    n, integer = split_at_integer(twice * 1.4426950408889634)
    scale = power_of_two(integer)
    u = expm1_near_0(beyond_ln2(twice, n)) * scale + (scale - 1.0)
    return with_sign_of(x, tl.div_rn(u, u + 2.0))


@triton.jit
def split_at_power(x):
    """``f`` and ``n``, both float32, with ``x == (1 + f) * 2**n`` and ``1 + f`` between the roots of 1/2 and 2."""
    subnormal = x < 1.1754943508222875e-38
    bits = tl.where(subnormal, x * 8388608.0, x).to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (bits >> 23) - tl.where(subnormal, 23, 0)
    fraction = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    return fraction, exponent.to(tl.float32)


@triton.jit
def log1p_beyond(f):
    """``log(1 + f) - f``, by the polynomial of Cephes' logf."""
    polynomial = ((7.0376836292e-2 * f + -1.1514610310e-1) * f + 1.1676998740e-1) * f + -1.2420140846e-1
    polynomial = ((polynomial * f + 1.4249322787e-1) * f + -1.6668057665e-1) * f + 2.0000714765e-1
    polynomial = (polynomial * f + -2.4999993993e-1) * f + 3.3333331174e-1
    square = f * f
    return square * f * polynomial + square * -0.5


@triton.jit
def at_limits(logarithm, x):
    """A logarithm's value where x is 0, infinite, negative or NaN too."""
    logarithm = tl.where(x == float("inf"), float("inf"), logarithm)
    return tl.where(x > 0.0, logarithm, tl.where(x == 0.0, float("-inf"), float("nan")))


@triton.jit
def log(x):
    """The natural logarithm of float32."""
    fraction, exponent = split_at_power(x)
    low = exponent * -2.12194440e-4 + log1p_beyond(fraction)
    return at_limits(exponent * 0.693359375 + (low + fraction), x)


@triton.jit
def log2(x):
    """The logarithm to base 2 of float32."""
    fraction, exponent = split_at_power(x)
    beyond = log1p_beyond(fraction)
    low = (fraction * 0.4426950408889634 + beyond * 0.4426950408889634) + beyond  # by log2(e) - 1
    return at_limits(low + fraction + exponent, x)


# Of float64.


@triton.jit
def remainder(a, b):
    """``a - b * floor(a / b)``, from ``a - b * trunc(a / b)``, which no rounding spoils."""
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def tanh_of_float64(x):
    """As :func:`tanh`."""
    magnitude = tl.abs(x)
    twice = 2 * tl.where(magnitude > 20, 20.0, magnitude)
    y = tl.exp(twice)
    u = tl.where(y == 1, twice, (y - 1) * twice / tl.log(y))  # Kahan's exp(x) - 1: the errors of y cancel
    bits = (u / (u + 2)).to(tl.int64, bitcast=True) | (x.to(tl.int64, bitcast=True) & -0x8000000000000000)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def power(base, exponent):
    """``base**exponent`` of float64, to 2e-13 of its value."""
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2 != exponent)
    result = tl.exp(exponent * tl.log(tl.abs(base)))
    result = tl.where((tl.abs(base) == 1) & (exponent == exponent), 1.0, result)
    result = tl.where(odd & (base.to(tl.int64, bitcast=True) < 0), result * -1.0, result)
    result = tl.where((base < 0) & (base != float("-inf")) & (whole == 0), float("nan"), result)
    return tl.where((base == 1) | (exponent == 0), 1.0, result)
