// The hccl backend: gloo over the memory of npu tensors, with HCCL's reductions and refusals.
#pragma once

#include "counting.h"
#include "memory.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <numeric>

namespace emulated_npu {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<std::vector<Tensor>>;

inline Tensors host_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) {
    views.push_back(host_view(tensor));
  }
  return views;
}

inline TensorLists host_views(const TensorLists& lists) {
  TensorLists views;
  for (const auto& list : lists) {
    views.push_back(host_views(list));
  }
  return views;
}

// A collective that has ended; its future holds the npu tensors.
class Ended final : public c10d::Work {
 public:
  explicit Ended(Tensors results) : results_(std::move(results)) {
    finish();
  }
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
};

class HcclOverGloo final : public c10d::Backend {
 public:
  explicit HcclOverGloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), number_(next_number()) {}

  // Tells the groups of this process apart.
  int64_t number() const {
    return number_;
  }

  c10::intrusive_ptr<c10d::Backend> gloo() const {
    return gloo_;
  }

  const std::string getBackendName() const override {
    return "hccl";
  }

  // ---- the same tensors everywhere ----

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check("broadcast", tensors);
    auto views = host_views(tensors);
    gloo_->broadcast(views, options)->wait();
    return ended(tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check("allreduce", tensors);
    auto views = host_views(tensors);
    auto plain = options;
    Reduction reduction(plain.reduceOp, views, getSize());
    gloo_->allreduce(reduction.inputs, plain)->wait();
    reduction.finish(reduction.inputs);
    return ended(tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return ended(tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check("reduce", tensors);
    auto views = host_views(tensors);
    auto plain = options;
    Reduction reduction(plain.reduceOp, views, getSize());
    gloo_->reduce(reduction.inputs, plain)->wait();
    if (getRank() == options.rootRank) {
      reduction.finish(reduction.inputs);
    }
    return ended(tensors);
  }

  // ---- pieces put together ----

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check("allgather", inputs);
    auto views = host_views(inputs);
    auto output_views = host_views(outputs);
    gloo_->allgather(output_views, views, options)->wait();
    return ended(outputs.at(0));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check("allgather_base", {input});
    auto output_view = host_view(output);
    auto view = host_view(input);
    gloo_->_allgather_base(output_view, view, options)->wait();
    return ended({output});
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _allgather_base(outputs[i], inputs.at(i), options);
    }
    return ended(outputs);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check("gather", inputs);
    auto views = host_views(inputs);
    auto output_views = host_views(outputs);
    gloo_->gather(output_views, views, options)->wait();
    return ended(outputs.empty() ? Tensors{} : outputs.at(0));
  }

  // ---- pieces handed out ----

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    check("scatter", outputs);
    auto output_views = host_views(outputs);
    auto views = host_views(inputs);
    gloo_->scatter(output_views, views, options)->wait();
    return ended(outputs);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check("reduce_scatter_base", {input});
    auto plain = options;
    Reduction reduction(plain.reduceOp, {host_view(input)}, getSize());
    Tensors result{host_view(output)};
    gloo_->_reduce_scatter_base(result[0], reduction.inputs[0], plain)->wait();
    reduction.finish(result);
    return ended({output});
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto joined = adopt(at::cat(host_views(inputs.at(i))), outputs[i].device());
      _reduce_scatter_base(outputs[i], joined, options);
    }
    return ended(outputs);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs.at(i), options);
    }
    return ended(outputs);
  }

  // ---- pieces exchanged ----

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check("alltoall_base", {input});
    TORCH_CHECK(input.dim() > 0 && output.dim() > 0, "HCCL exchanges no 0-dimensional tensors");
    auto output_view = host_view(output);
    auto view = host_view(input);
    gloo_->alltoall_base(output_view, view, output_splits, input_splits, options)->wait();
    return ended({output});
  }

  // gloo has no exchange of lists: they are joined, exchanged and taken apart.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    check("alltoall", inputs);
    Tensors pieces;
    std::vector<int64_t> input_splits, output_splits;
    for (const auto& input : inputs) {
      pieces.push_back(host_view(input).reshape(-1));
      input_splits.push_back(input.numel());
    }
    for (const auto& output : outputs) {
      output_splits.push_back(output.numel());
    }
    auto joined = at::cat(pieces);
    auto received =
        at::empty({std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0})}, joined.options());
    auto parts = received.split_with_sizes(output_splits); // before the call: gloo takes the lists away
    gloo_->alltoall_base(received, joined, output_splits, input_splits, options)->wait();
    for (size_t i = 0; i < outputs.size(); ++i) {
      host_view(outputs[i]).copy_(parts[i].view(outputs[i].sizes()));
    }
    return ended(outputs);
  }

  // ---- one to one: not waited for, because both sides may send first ----

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    check("send", tensors);
    auto views = host_views(tensors);
    return gloo_->send(views, to, tag);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    check("recv", tensors);
    auto views = host_views(tensors);
    return gloo_->recv(views, from, tag);
  }

  WorkPtr recvAnysource(Tensors& /*tensors*/, int /*tag*/) override {
    TORCH_CHECK(false, "HCCL cannot receive from any source: name the rank");
  }

  // ---- bookkeeping ----

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    counters().collective("barrier", 0);
    auto on_host = options;
    on_host.device_ids.clear();
    on_host.device.reset();
    gloo_->barrier(on_host)->wait();
    return ended({});
  }

  void startCoalescing() override {}
  WorkPtr endCoalescing() override {
    return ended({});
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void abort() override {
    gloo_->abort();
  }
  void shutdown() override {
    gloo_->shutdown();
  }

 private:
  // HCCL knows SUM, PRODUCT, MIN and MAX. Averages are a sum and a division in the tensor's own dtype; a premultiplied
  // sum scales the input where it lies.
  struct Reduction {
    Reduction(c10d::ReduceOp& op, Tensors views, int size) : inputs(std::move(views)), size(size) {
      for (auto& input : inputs) {
        check_dtype(input.scalar_type());
      }
      const auto kind = op.op_;
      TORCH_CHECK(
          kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
          "HCCL has no bitwise reductions");
      if (kind == c10d::ReduceOp::PREMUL_SUM) {
        premultiply(static_cast<const c10d::PreMulSumSupplement&>(*op.supplement_));
        op = c10d::ReduceOp::SUM;
      } else if (kind == c10d::ReduceOp::AVG) {
        average = true;
        op = c10d::ReduceOp::SUM;
      }
      as_bytes(op);
    }

    static void check_dtype(at::ScalarType dtype) {
      const bool known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kLong ||
          dtype == at::kInt || dtype == at::kShort || dtype == at::kChar || dtype == at::kBool;
      TORCH_CHECK(known, "HCCL reduces no ", dtype, " tensors (EMULATED; int8 to int64, fp16, bf16 and fp32 only)");
    }

    void premultiply(const c10d::PreMulSumSupplement& factor) {
      for (auto& input : inputs) {
        TORCH_CHECK(input.is_floating_point(), "HCCL multiplies only floating-point tensors before a sum");
        factor.tensor_factor.defined() ? input.mul_(host_view(factor.tensor_factor)) : input.mul_(factor.double_factor);
      }
    }

    // A sum of booleans is "any", and gloo reduces bytes.
    void as_bytes(c10d::ReduceOp& op) {
      for (auto& input : inputs) {
        if (input.scalar_type() == at::kBool) {
          input = input.view(at::kByte);
          op = op.op_ == c10d::ReduceOp::SUM ? c10d::ReduceOp(c10d::ReduceOp::MAX) : op;
        }
      }
    }

    void finish(Tensors& results) const {
      for (auto& result : results) {
        if (average) {
          result.div_(size);
        }
      }
    }

    Tensors inputs;
    int size;
    bool average = false;
  };

  static void check(const char* name, const Tensors& tensors) {
    int64_t bytes = 0;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(on_npu(tensor), "hccl ", name, " got a tensor on ", tensor.device(), ": only npu tensors go over HCCL");
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
    counters().collective(name, bytes);
  }

  static WorkPtr ended(Tensors results) {
    return c10::make_intrusive<Ended>(std::move(results));
  }

  static int64_t next_number() {
    static std::atomic<int64_t> next{0};
    return next++;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t number_;
};

} // namespace emulated_npu
