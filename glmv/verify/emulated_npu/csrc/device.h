// The device as PyTorch's core sees it: guard, streams, events, generators, hooks.
#pragma once

#include "counting.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace emulated_npu {

// Everything runs when it is called, so a stream is no more than a number that keeps streams apart.
inline c10::StreamId& current_stream(c10::DeviceIndex index) {
  thread_local std::array<c10::StreamId, kMaxDevices> streams{};
  return streams[index];
}

struct Event {
  std::chrono::steady_clock::time_point recorded;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNpu;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {kNpu, current_device()};
  }
  void setDevice(c10::Device device) const override {
    current_device() = checked(device).index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device() = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  void synchronizeDevice(const c10::DeviceIndex /*index*/) const override {
    counters().sync("synchronize");
  }

  c10::Stream getStream(c10::Device device) const override {
    device = checked(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, checked(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, checked(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_stream(stream.device_index()) = stream.id();
    return old;
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {
    counters().sync("synchronize");
  }

  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*index*/, c10::EventFlag /*flag*/)
      const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->recorded = std::chrono::steady_clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override {
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* /*event*/) const override {
    counters().sync("synchronize");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*index*/) const override {
    const auto span = static_cast<Event*>(end)->recorded - static_cast<Event*>(start)->recorded;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

// A CPU generator that says it lives on the npu. Device and host draw from streams of their own, as on real hardware.
class NpuGenerator final : public c10::GeneratorImpl {
 public:
  NpuGenerator(c10::DeviceIndex index, at::Generator host)
      : GeneratorImpl({kNpu, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host_(std::move(host)) {}

  at::Generator& host() {
    return host_;
  }
  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_offset(uint64_t /*offset*/) override {
    TORCH_CHECK(false, "the generator of the emulated npu is a Mersenne twister and has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the generator of the emulated npu is a Mersenne twister and has no offset");
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  NpuGenerator* clone_impl() const override {
    return new NpuGenerator(device().index(), host_.clone());
  }

  at::Generator host_;
};

inline at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<NpuGenerator>(index, at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) {
      generators->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return generators;
  }();
  return all->at(checked({kNpu, index}).index());
}

// The CPU generator inside; a generator of another device is refused in PyTorch's own words.
inline at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kNpu,
      "Expected a 'npu' device type for generator but found '", generator.device().type(), "'");
  return generator.get<NpuGenerator>()->host();
}

// FSDP2 frees and regrows parameters by resizing their storage.
inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = allocator().allocate_on(bytes, storage.device());
  if (bytes > 0 && storage.nbytes() > 0) {
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return true;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(checked({kNpu, index}).index());
  }
  c10::Device getDeviceFromPtr(void* /*pointer*/) const override {
    return {kNpu, current_device()};
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::owns(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedAllocator;
    return pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current_device() = checked({kNpu, index}).index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto old = current_device();
    setCurrentDevice(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
};

} // namespace emulated_npu
