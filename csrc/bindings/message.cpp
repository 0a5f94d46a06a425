#include "params/message.h"

#include <vector>

#include "stable.h"

namespace pyg_fast {
namespace {

MessageType message_type(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return MessageType::f32;
    case ScalarType::Double: return MessageType::f64;
    case ScalarType::Half: return MessageType::f16;
    case ScalarType::BFloat16: return MessageType::bf16;
    case ScalarType::Bool: return MessageType::boolean;
    case ScalarType::Int: return MessageType::i32;
    case ScalarType::Long: return MessageType::i64;
    default:
      STD_TORCH_CHECK(false, name, " must hold floats, bool, int32 or int64, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

const int64_t* numbers_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(!t.is_cuda() && t.dim() == 1 && t.is_contiguous(), name, " must be a vector");
  check_type(t, name, ScalarType::Long);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// Refuses instructions that would read or write outside of their spaces.
class Checker {
 public:
  Checker(const Message& p, const std::vector<int64_t>& kinds) : p_(p), kinds_(kinds) {}

  void check(int64_t num_words) {
    constexpr int64_t kHead = sizeof(MessageHeader) / 8, kSection = sizeof(MessageSection) / 8,
                      kWords = sizeof(MessageInstruction) / 8;
    want(num_words >= kHead);
    head_ = reinterpret_cast<const MessageHeader*>(p_.code);
    want(head_->tile_edges >= 1 && head_->tile_edges < 1 << 20 && head_->tile_size >= 0 &&
         head_->uniform_size >= p_.num_numbers && head_->num_sections >= 1 &&
         head_->tile_size < kMost && head_->uniform_size < kMost);
    int64_t at = kHead;
    for (int64_t s = 0; s < head_->num_sections; ++s) {
      want(at + kSection <= num_words);
      const auto& section = *reinterpret_cast<const MessageSection*>(p_.code + at);
      at += kSection;
      want(section.first >= 0 && section.step >= 0 && section.repeats >= 1 &&
           section.first < kMost && section.step < kMost && section.repeats < kMost);
      last_column_ = section.first + section.step * (section.repeats - 1);
      edges_ = s == 0 ? 1 : head_->tile_edges;
      want(section.num_instructions >= 0 && section.num_instructions <= (num_words - at) / kWords);
      for (int64_t k = 0; k < section.num_instructions; ++k, at += kWords) {
        check(*reinterpret_cast<const MessageInstruction*>(p_.code + at), s == 0);
      }
    }
    want(at == num_words);
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 40;

  static void want(bool good) { STD_TORCH_CHECK(good, "code is not that of a message"); }

  // How many numbers an operand may address.
  int64_t room(int64_t space) const {
    if (space == 0) return head_->tile_size;
    if (space == 1) return head_->uniform_size;
    if (space < 2 + p_.num_inputs) return p_.input[space - 2].width;
    return p_.output[space - 2 - p_.num_inputs].width;
  }

  void check(const MessageInstruction& i, bool first) const {
    using Op = MessageOp;
    want(i.op >= 0 && i.op < static_cast<int64_t>(Op::count));
    const auto op = static_cast<Op>(i.op);
    want(i.num_dims >= 1 && i.num_dims <= kMessageDims && i.edge_dim >= -1 &&
         i.edge_dim < i.num_dims && (!first || i.edge_dim < 0));
    want(op != Op::product || i.num_dims >= 3);
    const bool of_two = (op >= Op::add && op < Op::where) || op == Op::dot || op == Op::product ||
                        op == Op::row_product;
    int operands = op == Op::where || op == Op::fma ? 4 : of_two ? 3 : 2;
    int begin = 0;
    if (op == Op::load || op == Op::picked || op == Op::keep) {
      operands = 1;
      want(!first && i.num_dims == 2 && i.edge_dim == 0 && i.size[0] == 1 &&
           i.operand[0].stride[1] == 1);
    }
    const bool result = op >= Op::row_sum;
    if (result) {
      begin = op == Op::row_softmax ? 0 : 1;
      const int dims = op == Op::row_product ? 3 : 2;
      want(!first && i.num_dims == dims && i.edge_dim == 0 && i.size[0] == 1 &&
           i.operand[1].stride[dims - 1] == 1);
    }
    for (int k = 0; op == Op::row_softmax && k < 2; ++k) {
      const auto& o = i.operand[k];
      want(o.space == 0 && o.column == 0 && o.stride[0] == i.size[1] && o.stride[1] == 1);
    }
    if (op == Op::row_product) want(i.operand[2].stride[2] <= 1);
    for (int d = 0; d < i.num_dims; ++d) want(i.size[d] >= 1 && i.size[d] < kMost);
    for (int k = begin; k < operands; ++k) {
      const auto& o = i.operand[k];
      want(o.space >= 0 && o.space < 2 + p_.num_inputs + p_.num_outputs && o.offset >= 0 &&
           o.offset < kMost && (o.column == 0 || o.column == 1));
      const bool input = o.space >= 2 && o.space < 2 + p_.num_inputs;
      if (k == 0) want(!input);
      if (k > 0) want(o.space < 2 + p_.num_inputs);
      if (o.space >= 2 + p_.num_inputs) want(kinds_[o.space - 2 - p_.num_inputs] == 2);
      int64_t reach = o.offset + o.column * last_column_;
      const bool indexed = input && p_.input[o.space - 2].index != MessageIndex::none;
      if (indexed) {
        const auto type = p_.input[o.space - 2].type;
        want(type == (p_.wide ? MessageType::f64 : MessageType::f32));
        want(i.edge_dim == 0 && i.size[0] == 1 && op != Op::product);
      }
      for (int d = 0; d < i.num_dims; ++d) {
        if (indexed && d == 0) continue;
        const int64_t size = d == i.edge_dim ? i.size[d] * edges_ : i.size[d];
        int64_t steps = 0;
        want(o.stride[d] >= 0 && !__builtin_mul_overflow(size - 1, o.stride[d], &steps) &&
             steps < kMost);
        reach += steps;
      }
      want(reach < room(o.space));
    }
    const auto is_input = [&](int64_t k) {
      return k >= 0 && k < p_.num_inputs && p_.input[k].index != MessageIndex::none;
    };
    const int64_t column = i.operand[0].column * last_column_;
    if (op == Op::load || op == Op::picked) {
      want(is_input(i.extra[0]) && i.extra[3] >= 0 && i.extra[3] <= 1);
      want(i.size[1] + i.extra[3] * last_column_ <= p_.input[i.extra[0]].width);
    }
    if (op == Op::picked) {
      want(is_input(i.extra[1]) && p_.input[i.extra[1]].width == p_.input[i.extra[0]].width);
      want(p_.input[i.extra[1]].type == (p_.csr.index64 ? MessageType::i64 : MessageType::i32));
    }
    if (op == Op::keep) {
      want(i.extra[2] >= 0 && i.extra[2] < p_.num_numbers && i.extra[1] >= 0 &&
           i.extra[1] <= 0xffffffff && column == 0);
    }
    if (result) {
      want(i.extra[0] >= 0 && i.extra[0] < p_.num_outputs && i.extra[1] >= 0 && i.extra[1] <= 1);
      const auto& output = p_.output[i.extra[0]];
      int64_t n = i.size[1];
      want(op != Op::row_product || !__builtin_mul_overflow(n, i.size[2], &n));
      want(n <= output.width - i.extra[1] * last_column_);
      want(kinds_[i.extra[0]] == (op == Op::to_edge ? 1 : 0));
      want(output.softmax == (op == Op::row_softmax));
      want((op == Op::row_max || op == Op::row_min || output.softmax) == (output.arg != nullptr));
      if (op == Op::row_product && i.extra[3] != 0) {
        want(i.extra[3] > 0 && n % i.extra[3] == 0 && i.extra[2] >= 0 &&
             i.extra[2] < p_.num_outputs);
        const auto& softmax = p_.output[i.extra[2]];
        want(softmax.softmax && i.extra[3] + i.extra[1] * last_column_ <= softmax.width);
      }
    }
  }

  const Message& p_;
  const std::vector<int64_t>& kinds_;
  const MessageHeader* head_ = nullptr;
  int64_t last_column_ = 0, edges_ = 1;
};

template <bool kCuda>
void message_pass(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, int64_t num_cols,
                  const Tensor& code, const Tensor& numbers, std::vector<Tensor> inputs,
                  std::vector<int64_t> index, std::vector<Tensor> outs, std::vector<int64_t> kinds,
                  std::vector<Tensor> args, const OptTensor& seed, bool wide, int64_t shares) {
  static_assert(!kCuda, "CUDA runs generated kernels");
  Message p;
  p.csr = csr_of(rowptr, col, perm, num_cols);
  p.wide = wide;
  p.code = numbers_of(code, "code");
  STD_TORCH_CHECK(numbers.dim() == 1 && numbers.is_contiguous() && !numbers.is_cuda(),
                  "numbers must be a vector");
  check_type(numbers, "numbers", ScalarType::Double);
  p.numbers = static_cast<const double*>(numbers.const_data_ptr());
  p.num_numbers = numbers.size(0);
  if (seed) {
    check_type(seed, "seed", ScalarType::Long);
    check_device(seed, "seed", col);
    STD_TORCH_CHECK(seed->numel() == 1, "seed must be one number");
    p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  }
  STD_TORCH_CHECK(shares >= 1, "shares must be positive");
  STD_TORCH_CHECK(inputs.size() == index.size(), "index must have a number for each input");
  STD_TORCH_CHECK(outs.size() == kinds.size(), "kinds must have a number for each output");
  const int64_t rows[] = {1, p.csr.num_rows, p.csr.num_cols, p.csr.num_edges};
  std::vector<MessageInput> input(inputs.size());
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Tensor& t = inputs[k];
    check_device(t, "an input", col);
    STD_TORCH_CHECK(t.is_contiguous(), "inputs must be contiguous");
    STD_TORCH_CHECK(index[k] >= 0 && index[k] <= 3, "index must be 0 to 3");
    input[k].data = t.const_data_ptr();
    input[k].type = message_type(t, "an input");
    input[k].index = static_cast<MessageIndex>(index[k]);
    input[k].width = t.numel();
    if (index[k] != 0) {
      STD_TORCH_CHECK(t.dim() >= 1 && t.size(0) >= rows[index[k]], "an input has too few rows");
      input[k].width = 1;
      for (int64_t d = 1; d < t.dim(); ++d) input[k].width *= t.size(d);
    }
  }
  std::vector<MessageOutput> output(outs.size());
  size_t used = 0;
  for (size_t k = 0; k < outs.size(); ++k) {
    // 0: a row for each row, 1: for each edge, 2: for each share; 3: for each row, with the edges; 4: for
    // each row, with the reciprocals of the sums of a softmax.
    STD_TORCH_CHECK(kinds[k] >= 0 && kinds[k] <= 4, "kinds must be 0 to 4");
    const auto check = [&](const Tensor& t) {
      check_device(t, "an output", col);
      const int64_t count = kinds[k] == 1   ? p.csr.num_edges
                            : kinds[k] == 2 ? shares
                                            : p.csr.num_rows;
      STD_TORCH_CHECK(t.is_contiguous() && t.dim() >= 1 && t.size(0) == count,
                      "outputs must be contiguous, with a row for each row, edge or share");
    };
    check(outs[k]);
    output[k].data = outs[k].mutable_data_ptr();
    output[k].type = message_type(outs[k], "an output");
    STD_TORCH_CHECK(output[k].type <= MessageType::bf16, "outputs must hold floats");
    output[k].width = 1;
    for (int64_t d = 1; d < outs[k].dim(); ++d) output[k].width *= outs[k].size(d);
    output[k].softmax = kinds[k] == 4;
    output[k].total = kinds[k] == 2;
    if (kinds[k] == 2 || output[k].softmax) {
      STD_TORCH_CHECK(output[k].type == (wide ? MessageType::f64 : MessageType::f32),
                      "sums over all edges and softmaxes must have the type of the computation");
    }
    if (kinds[k] == 2) {
      __builtin_memset(output[k].data, 0, static_cast<size_t>(outs[k].numel()) * (wide ? 8 : 4));
    }
    if (kinds[k] >= 3) {
      kinds[k] = 0;
      STD_TORCH_CHECK(used < args.size(), "a maximum, minimum or softmax needs a second tensor");
      check(args[used]);
      check_type(args[used], "args",
                 output[k].softmax ? outs[k].scalar_type() : rowptr.scalar_type());
      STD_TORCH_CHECK(args[used].numel() == outs[k].numel(), "args must have the size of outputs");
      output[k].arg = args[used++].mutable_data_ptr();
    }
  }
  STD_TORCH_CHECK(used == args.size(), "too many args");
  p.input = input.data();
  p.num_inputs = static_cast<int64_t>(input.size());
  p.output = output.data();
  p.num_outputs = static_cast<int64_t>(output.size());
  Checker(p, kinds).check(code.size(0));
  parallel(shares, (p.csr.num_edges + p.csr.num_rows) * 64, [&](int64_t k) {
    cpu::message(p, k, cpu::row_of_share(p.csr, k, shares),
                 cpu::row_of_share(p.csr, k + 1, shares));
  });
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // A pass of a traced message, as pyg_fast/message/_cpu.py encodes it. `index` says what counts the rows
  // of each input (params/message.h), `kinds` what the rows of each output are: rows (0), edges (1),
  // shares (2), rows with chosen edges in `args` (3), rows with reciprocals of sums in `args` (4).
  m.def(
      "message_pass(Tensor rowptr, Tensor col, Tensor? perm, int num_cols, Tensor code, "
      "Tensor numbers, Tensor[] inputs, int[] index, Tensor(a!)[] outs, int[] kinds, "
      "Tensor(b!)[] args, Tensor? seed, bool wide, int shares) -> ()");
}

PYG_FAST_CPU_IMPL(message_pass)
