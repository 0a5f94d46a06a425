// A pass of a traced message on the CPU: a list of instructions for tiles of edges.
#pragma once
#include "common.h"

namespace pyg_fast {

// The numbers of the instructions; pyg_fast/message/_cpu.py has the same order.
// clang-format off
enum class MessageOp : int64_t {
  // out = f(a)
  copy, neg, abs, exp, exp2, expm1, log, log2, log10, log1p, sqrt, rsqrt, reciprocal, sin, cos, tanh,
  sigmoid, erf, sign, floor, ceil, relu, logical_not, asin, acos, atan,
  // out = f(a, b), f(a, b, c)
  add, sub, mul, div, pow, maximum, minimum, lt, le, gt, ge, eq, ne, logical_and, logical_or,
  atan2, where,
  fma,  // a * b + c
  // Inputs
  load,    // rows of input extra[0]
  picked,  // rows of input extra[0] where those of input extra[1] hold the edge's number, 0 elsewhere
  keep,    // dropout extra[0], threshold extra[1], scale numbers[extra[2]]
  // Reductions into `out`, which already holds numbers
  sum, amax, amin,
  dot,  // the sums of a * b, added to `out` if extra[0]
  product,  // out[.., m, n] = sum over k of a[.., m, k] * b[.., k, n]; the last dimensions are m, k, n
  // Results of output extra[0]
  row_sum, row_mean, row_max, row_min, to_edge,
  // sums of a * b: of size[1] heads of size[2] numbers. extra[3] is 0: a mean if extra[2], else sums.
  // Else: the average by the softmax of output extra[2], which has extra[3] numbers for these.
  row_product,
  row_softmax,  // writes exp(scores - the largest so far) to operand 0
  count,
};
// clang-format on

constexpr int kMessageDims = 6;

// Where an operand's numbers are. Spaces: the values of a tile of edges (0), values that all edges share
// (1), input k (2 + k), partial sums of output k (2 + number of inputs + k).
struct MessageOperand {
  int64_t space;
  int64_t offset;
  int64_t column;  // 1: the first column of the chunk is added to the offset
  int64_t stride[kMessageDims];
};

// All fields have 64 bits: Python writes them as one tensor.
struct MessageInstruction {
  int64_t op;
  int64_t num_dims;
  int64_t size[kMessageDims];
  int64_t edge_dim;           // its size is times the number of edges of the tile; -1: none
  MessageOperand operand[4];  // the result first
  int64_t extra[4];
};

// Instructions for `repeats` chunks of columns, `step` apart from `first` on.
struct MessageSection {
  int64_t first;
  int64_t step;
  int64_t repeats;
  int64_t num_instructions;
};

struct MessageHeader {
  int64_t tile_edges;
  int64_t tile_size;     // numbers of space 0
  int64_t uniform_size;  // numbers of space 1; it begins with the constants
  int64_t num_sections;  // the first runs once, for values that all edges share
};

enum class MessageType : int8_t { f32, f64, f16, bf16, boolean, i32, i64 };
// What counts the rows of an input.
enum class MessageIndex : int8_t { none, row, col, edge };

struct MessageInput {
  const void* data = nullptr;
  int64_t width = 0;  // numbers of a row; `none`: all numbers
  MessageType type = MessageType::f32;
  MessageIndex index = MessageIndex::none;
};

struct MessageOutput {
  void* data = nullptr;  // of a softmax: the largest score
  // Of a maximum or minimum: the chosen edge, of rowptr's type. Of a softmax: the reciprocal of the sum.
  void* arg = nullptr;
  bool softmax = false;
  bool total = false;  // sums over all edges
  int64_t width = 0;
  MessageType type = MessageType::f32;
};

struct Message {
  Csr csr;
  const int64_t* code = nullptr;
  const double* numbers = nullptr;
  int64_t num_numbers = 0;
  const MessageInput* input = nullptr;
  int64_t num_inputs = 0;
  const MessageOutput* output = nullptr;
  int64_t num_outputs = 0;
  uint64_t seed = 0;
  bool wide = false;  // computes in float64, else in float32
};

namespace cpu {
// Rows [begin, end); partial sums go to row `share` of their outputs, which hold zeros.
void message(const Message& p, int64_t share, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace pyg_fast
