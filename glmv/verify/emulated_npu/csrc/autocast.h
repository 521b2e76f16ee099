// Autocast for the npu: which operators run in the lower precision and which in fp32.
// Source: PyTorch's own lists for accelerators (ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32),
// restricted to what training of transformers calls.
#pragma once

#include "memory.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace emulated_npu {

constexpr const char* kLowerPrecision[] = {
    "_convolution", "conv1d", "conv2d", "conv3d", "convolution", "addmm",   "addmv",  "addr",
    "matmul",       "einsum", "mm",     "mv",     "linear",      "addbmm",  "baddbmm", "bmm",
    "prelu",        "scaled_dot_product_attention"};

constexpr const char* kFp32[] = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "nll_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "dist", "logsumexp",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d"};

// Sums and the like run in fp32 unless the caller names a dtype.
constexpr const char* kFp32WithoutDtype[] = {
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList"};

inline c10::IValue cast(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? at::autocast::cached_cast(dtype, value.toTensor(), kNpu) : value.toTensor();
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(at::autocast::cached_cast(dtype, tensor, kNpu));
    }
    return list;
  }
  return value;
}

inline void run_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    (*stack)[i] = cast((*stack)[i], dtype);
  }
  op.callBoxed(stack);
}

inline void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(op, stack, at::autocast::get_autocast_dtype(kNpu));
}

inline void in_fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(op, stack, at::kFloat);
}

inline void in_fp32_without_dtype(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& formal = op.schema().arguments();
  const size_t first = stack->size() - formal.size();
  const bool is_float = (*stack)[first].toTensor().is_floating_point();
  for (size_t i = 0; is_float && i < formal.size(); ++i) {
    if (formal[i].name() == "dtype" && (*stack)[first + i].isNone()) {
      (*stack)[first + i] = static_cast<int64_t>(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

inline void register_autocast(torch::Library& library) {
  for (const char* name : kLowerPrecision) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  }
  for (const char* name : kFp32) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_fp32>());
  }
  for (const char* name : kFp32WithoutDtype) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_fp32_without_dtype>());
  }
}

} // namespace emulated_npu
