// Every ATen operator without a kernel of ours: run the CPU kernel on the same memory, and count.
#pragma once

#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace emulated_npu {

using c10::IValue;
using torch::jit::Stack;

// Operators whose result size depends on values, so that the host must wait. bincount asks for minimum and maximum.
inline int64_t waits(const std::string& name) {
  static const std::unordered_map<std::string, int64_t> table{
      {"aten::nonzero", 1},       {"aten::masked_select", 1},     {"aten::_unique", 1}, {"aten::_unique2", 1},
      {"aten::unique_dim", 1},    {"aten::unique_consecutive", 1}, {"aten::equal", 1},   {"aten::bincount", 2},
      {"aten::unique_dim_consecutive", 1}};
  auto found = table.find(name);
  return found == table.end() ? 0 : found->second;
}

// The matrix unit multiplies fp16, bf16 and fp32 only.
inline bool is_matmul(const std::string& name) {
  static const std::unordered_set<std::string> table{
      "aten::mm",      "aten::bmm",     "aten::addmm", "aten::baddbmm",         "aten::addbmm",
      "aten::mv",      "aten::addmv",   "aten::dot",   "aten::convolution_overrideable"};
  return table.count(name) > 0;
}

// Indices may come from the host: the real operator moves them over by itself.
inline bool takes_host_indices(const std::string& name) {
  static const std::unordered_set<std::string> table{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
  return table.count(name) > 0;
}

template <typename F>
void for_each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) {
        visit(*tensor);
      }
    }
  }
}

inline c10::ArrayRef<IValue> arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
  const size_t count = op.schema().arguments().size();
  return c10::ArrayRef<IValue>(stack.data() + stack.size() - count, count); // braces would make a list of two values
}

// One call: its npu tensors become host views, and what comes out becomes npu tensors again.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack), name_(op.schema().name()) {
    find_device();
  }

  void run() {
    counters().call(name_);
    count_waits();
    refuse_what_the_device_cannot();
    const size_t first = stack_.size() - op_.schema().arguments().size();
    for (size_t i = first; i < stack_.size(); ++i) {
      stack_[i] = to_host(stack_[i]);
    }
    give_generator(first);
    call_host_kernel();
    write_back();
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      stack_[i] = to_npu(stack_[i]);
    }
  }

 private:
  struct Argument {
    Tensor npu;
    Tensor host;
    const void* memory;
  };

  // The device of the call; tensors elsewhere are refused, except single numbers on the host.
  void find_device() {
    auto arguments = arguments_of(op_, stack_);
    for (const auto& value : arguments) {
      for_each_tensor(value, [&](const Tensor& tensor) {
        if (on_npu(tensor) && !device_) {
          device_ = tensor.device();
        }
      });
      if (value.isDevice() && value.toDevice().type() == kNpu && !device_) {
        device_ = checked(value.toDevice());
      }
    }
    for (size_t i = 0; device_ && i < arguments.size(); ++i) {
      for_each_tensor(arguments[i], [&](const Tensor& tensor) { refuse_other_device(tensor, i); });
    }
  }

  void refuse_other_device(const Tensor& tensor, size_t position) const {
    if (!tensor.defined() || tensor.device() == *device_) {
      return;
    }
    const bool number = tensor.device().is_cpu() && tensor.dim() == 0;
    const bool index = tensor.device().is_cpu() && position > 0 && takes_host_indices(name_);
    TORCH_CHECK(
        number || index,
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
        tensor.device(), "! (argument ", op_.schema().arguments()[position].name(), " of ", name_, ")");
  }

  void count_waits() const {
    if (!device_) {
      return;
    }
    auto arguments = arguments_of(op_, stack_);
    if (const auto times = waits(name_)) {
      counters().sync(name_, times);
    } else if (name_ == "aten::repeat_interleave" && arguments.back().isNone()) {
      counters().sync(name_); // the length of the result is the sum of the repeats, unless the caller says it
    } else if (name_ == "aten::_index_put_impl_") {
      for_each_tensor(arguments[1], [&](const Tensor& index) {
        if (on_npu(index) && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)) {
          counters().sync(name_); // a mask is turned into positions first; where one is read, PyTorch calls nonzero itself
        }
      });
    }
  }

  void refuse_what_the_device_cannot() const {
    if (!device_ || !is_matmul(name_)) {
      return;
    }
    for (const auto& value : arguments_of(op_, stack_)) {
      for_each_tensor(value, [&](const Tensor& tensor) {
        TORCH_CHECK(
            !tensor.defined() || tensor.scalar_type() != at::kDouble,
            name_, " has no float64 kernel on an NPU (EMULATED): use float32, or run on the CPU");
      });
    }
  }

  Tensor to_host(const Tensor& tensor) {
    if (!on_npu(tensor)) {
      return tensor;
    }
    for (const auto& argument : arguments_) {
      if (argument.npu.is_same(tensor)) {
        return argument.host;
      }
    }
    auto host = host_view(tensor);
    arguments_.push_back({tensor, host, host.storage().data()});
    return host;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) {
      return to_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for_each_tensor(value, [&](const Tensor& tensor) { list.push_back(to_host(tensor)); });
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor.has_value() ? std::optional<Tensor>(to_host(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kNpu) {
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // An operator with a generator argument draws from the device's own generator.
  void give_generator(size_t first) {
    const auto& formal = op_.schema().arguments();
    for (size_t i = 0; device_ && i < formal.size(); ++i) {
      const auto* optional = formal[i].type()->castRaw<c10::OptionalType>();
      if (optional == nullptr || optional->getElementType()->kind() != c10::TypeKind::GeneratorType) {
        continue;
      }
      const auto& given = stack_[first + i];
      stack_[first + i] =
          host_generator(given.isNone() ? default_generator(device_->index()) : given.toGenerator());
      has_generator_ = true;
    }
  }

  void call_host_kernel() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!device_ || has_generator_ || !op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.callBoxed(stack_);
      return;
    }
    // native_dropout and others take no generator: the host's default one plays the device's for this call.
    auto device_generator = host_generator(default_generator(device_->index()));
    auto host_default = at::detail::getDefaultCPUGenerator();
    auto host_state = host_default.get_state();
    host_default.set_state(device_generator.get_state());
    try {
      op_.callBoxed(stack_);
    } catch (...) {
      host_default.set_state(host_state);
      throw;
    }
    device_generator.set_state(host_default.get_state());
    host_default.set_state(host_state);
  }

  // An out= argument that the CPU kernel resized or restrided.
  void write_back() {
    for (auto& argument : arguments_) {
      if (argument.host.sizes() == argument.npu.sizes() && argument.host.strides() == argument.npu.strides() &&
          argument.host.storage().data() == argument.memory) {
        continue;
      }
      auto* impl = argument.npu.unsafeGetTensorImpl();
      if (argument.host.storage().data() != argument.memory) {
        const auto& host = argument.host.storage();
        resize_storage(argument.npu.storage(), host.nbytes());
        std::memcpy(argument.npu.storage().mutable_data(), host.data(), host.nbytes());
      }
      impl->set_sizes_and_strides(argument.host.sizes(), argument.host.strides(), argument.host.storage_offset());
    }
  }

  // An argument again, a view of an argument's memory, or a new tensor.
  Tensor to_npu(const Tensor& result) {
    if (!device_ || !result.defined() || !result.device().is_cpu()) {
      return result;
    }
    for (const auto& argument : arguments_) {
      if (argument.host.is_same(result)) {
        return argument.npu;
      }
    }
    const void* memory = result.storage().data();
    for (const auto& argument : arguments_) {
      if (memory != nullptr && argument.memory == memory) {
        return npu_tensor(argument.npu.storage(), result);
      }
    }
    for (const auto& [host, npu] : adopted_) {
      if (memory != nullptr && host == memory) {
        return npu_tensor(npu, result);
      }
    }
    adopted_.emplace_back(memory, adopt_storage(result.storage(), *device_));
    return npu_tensor(adopted_.back().second, result);
  }

  IValue to_npu(const IValue& value) {
    if (value.isTensor()) {
      return to_npu(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for_each_tensor(value, [&](const Tensor& tensor) { list.push_back(to_npu(tensor)); });
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  Stack& stack_;
  const std::string name_;
  std::optional<c10::Device> device_;
  std::vector<Argument> arguments_;
  std::vector<std::pair<const void*, c10::Storage>> adopted_;
  bool has_generator_ = false;
};

inline void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  HostCall(op, *stack).run();
}

} // namespace emulated_npu
