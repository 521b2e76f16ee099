// ATen operators that the fallback cannot run: they make, resize, view or move device memory, or lack a CPU kernel.
#pragma once

#include "fallback.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

namespace emulated_npu {

using c10::SymInt;
using c10::SymIntArrayRef;
using OptionalSymInt = std::optional<SymInt>;

constexpr c10::DispatchKeySet npu_keys{c10::DispatchKey::PrivateUse1};

// ---- making ----

inline Tensor poisoned(Tensor tensor) {
  if (settings().poison && !tensor.is_floating_point() && !tensor.is_complex()) {
    auto host = host_view(tensor);
    poison_integers(host);
  }
  return tensor;
}

// The allocator reads the current device, so the device that the caller names is made current for the call.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : old_(current_device()) {
    current_device() = checked(device.value_or(c10::Device(kNpu))).index();
  }
  ~OnDevice() {
    current_device() = old_;
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex old_;
};

inline Tensor empty(
    SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device, std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return poisoned(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator(), npu_keys, c10::dtype_or_default(dtype), format));
}

inline Tensor empty_strided(
    SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  OnDevice on(device);
  return poisoned(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(), npu_keys,
      c10::dtype_or_default(dtype)));
}

inline const Tensor& resize(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed =
      static_cast<size_t>((c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size());
  if (self.storage().nbytes() < needed) {
    resize_storage(self.storage(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

inline Tensor& set_storage_strided(
    Tensor& self, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage_strided(self, std::move(storage), 0, {SymInt(elements)}, {SymInt(1)});
}

// ---- viewing ----

inline Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, OptionalSymInt offset) {
  const auto start = offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

inline Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// ---- moving ----

// Device to host waits, unless the copy is asynchronous into pinned memory.
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (on_npu(self) && to.device().is_cpu() && !(non_blocking && to.is_pinned())) {
    counters().sync("copy to the host");
  }
  host_view(to).copy_(host_view(self));
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, /*non_blocking=*/false);
}

inline at::Scalar local_scalar(const Tensor& self) {
  counters().sync("item");
  return host_view(self).item();
}

// Memory is freed when nobody uses it, and no stream runs behind the host.
inline void record_stream(Tensor& /*self*/, c10::Stream /*stream*/) {}

// ---- computing ----

// The device counts integers; the CPU kernel does not.
inline Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  counters().call("aten::histc");
  auto host = host_view(self);
  if (at::isFloatingType(host.scalar_type())) {
    return adopt(at::histc(host, bins, low, high), self.device());
  }
  return adopt(at::histc(host.to(at::kDouble), bins, low, high).to(host.scalar_type()), self.device());
}


inline void check_convolution(const Tensor& input, const Tensor& weight) {
  counters().call("aten::convolution");
  TORCH_CHECK(
      input.device() == weight.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
      input.device(), " and ", weight.device(), "! (argument weight of aten::convolution)");
  TORCH_CHECK(
      input.scalar_type() != at::kDouble,
      "aten::convolution has no float64 kernel on an NPU (EMULATED): use float32, or run on the CPU");
}

inline Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
    SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups) {
  check_convolution(input, weight);
  std::optional<Tensor> host_bias;
  if (bias.has_value() && bias->defined()) {
    host_bias = host_view(*bias);
  }
  auto result = at::convolution_symint(
      host_view(input), host_view(weight), host_bias, stride, padding, dilation, transposed, output_padding,
      std::move(groups));
  return adopt(result, input.device());
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups,
    std::array<bool, 3> wanted) {
  check_convolution(input, weight);
  std::vector<SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
      host_view(grad), host_view(input), host_view(weight), at::OptionalSymIntArrayRef(bias_size), stride, padding,
      dilation, transposed, output_padding, std::move(groups), wanted);
  auto moved = [&](const Tensor& host) { return host.defined() ? adopt(host, input.device()) : host; };
  return {moved(grad_input), moved(grad_weight), moved(grad_bias)};
}

inline void register_kernels(torch::Library& library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_strided));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("histc", TORCH_FN(histc));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

} // namespace emulated_npu
