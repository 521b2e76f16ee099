// Device memory that is host memory: the allocator, pinned memory, and views that let CPU kernels work on it in place.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace emulated_npu {

using at::Tensor;

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

// ---- settings, and the current device of each thread (autograd has a thread for every device) ----

struct Settings {
  int devices = 1;
  bool poison = false;
};

inline Settings& settings() {
  static Settings instance;
  return instance;
}

inline c10::DeviceIndex& current_device() {
  thread_local c10::DeviceIndex index = 0;
  return index;
}

inline c10::Device checked(c10::Device device) {
  const int index = device.has_index() ? device.index() : current_device();
  TORCH_CHECK(
      index >= 0 && index < settings().devices,
      "npu:", index, " does not exist: the emulated machine has ", settings().devices, " device(s)");
  return {kNpu, static_cast<c10::DeviceIndex>(index)};
}

inline bool on_npu(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// ---- bytes in use, for torch.npu.memory_allocated and its peak ----

struct Usage {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) {
    const int64_t total = now += bytes;
    int64_t seen = peak;
    while (total > seen && !peak.compare_exchange_weak(seen, total)) {
    }
  }
};

inline Usage& usage(c10::DeviceIndex index) {
  static auto* all = new std::array<Usage, kMaxDevices>;
  return (*all)[index];
}

// A piece of device memory: malloc'ed, or the memory of a CPU result that became an npu tensor without a copy.
struct Block {
  Block(void* memory, c10::Storage host, int64_t bytes, c10::DeviceIndex device)
      : memory(memory), host(std::move(host)), bytes(bytes), device(device) {
    usage(device).add(bytes);
  }
  ~Block() {
    usage(device).add(-bytes);
    std::free(memory);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* memory;
  c10::Storage host;
  int64_t bytes;
  c10::DeviceIndex device;
};

inline void release_block(void* block) {
  delete static_cast<Block*>(block);
}

class NpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(bytes, {kNpu, current_device()});
  }

  c10::DataPtr allocate_on(size_t bytes, c10::Device device) {
    void* memory = nullptr;
    if (bytes > 0) {
      memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      TORCH_CHECK(memory != nullptr, "the emulated npu cannot get ", bytes, " bytes of host memory");
      if (settings().poison) {
        std::memset(memory, 0xFF, bytes); // NaN in every floating-point format
      }
    }
    auto* block = new Block(memory, c10::Storage(), static_cast<int64_t>(bytes), device.index());
    return {memory, block, &release_block, device};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

inline NpuAllocator& allocator() {
  static auto* instance = new NpuAllocator;
  return *instance;
}

// All bits set is -1 in integers, which indexing would accept: they get a large odd value instead.
template <typename T>
void fill_integers(Tensor& host, T value) {
  auto* data = static_cast<T*>(host.mutable_data_ptr());
  std::fill(data, data + host.storage().nbytes() / sizeof(T), value);
}

inline void poison_integers(Tensor& host) {
  if (host.storage().nbytes() == 0) {
    return;
  }
  switch (host.scalar_type()) {
    case at::kLong: fill_integers<int64_t>(host, 0x7FFFFFFFFFFFFFF1LL); break;
    case at::kInt: fill_integers<int32_t>(host, 0x7FFFFFF1); break;
    case at::kShort: fill_integers<int16_t>(host, 0x7FF1); break;
    case at::kChar: fill_integers<int8_t>(host, 0x7B); break;
    case at::kByte: fill_integers<uint8_t>(host, 0xFB); break;
    case at::kBool: fill_integers<uint8_t>(host, 1); break;
    default: break;
  }
}

// ---- pinned memory: host memory that remembers that it is pinned, because only such copies do not wait ----

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes > 0 ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(bytes == 0 || memory != nullptr, "the emulated npu cannot get ", bytes, " bytes of pinned memory");
    std::lock_guard<std::mutex> lock(mutex());
    ranges()[memory] = bytes;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  static bool owns(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(const_cast<void*>(pointer));
    if (after == ranges().begin()) {
      return false;
    }
    const auto& [start, bytes] = *std::prev(after);
    return pointer < static_cast<const char*>(start) + bytes;
  }

 private:
  static std::map<void*, size_t>& ranges() {
    static auto* instance = new std::map<void*, size_t>;
    return *instance;
  }

  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }

  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(memory);
    }
    std::free(memory);
  }
};

// ---- the two views ----

// A CPU tensor over the memory of an npu tensor; it keeps that memory alive.
inline Tensor host_view(const Tensor& tensor) {
  if (!on_npu(tensor)) {
    return tensor;
  }
  const auto& storage = tensor.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr data(
      storage.mutable_data_ptr().get(),
      keep,
      [](void* kept) { delete static_cast<c10::Storage*>(kept); },
      c10::Device(c10::kCPU));
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  if (tensor.is_neg()) {
    view._set_neg(true);
  }
  return view;
}

inline Tensor npu_tensor(c10::Storage storage, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The memory of a CPU result becomes device memory, without a copy.
inline c10::Storage adopt_storage(const c10::Storage& host, c10::Device device) {
  void* memory = host.mutable_data_ptr().get();
  auto* block = new Block(nullptr, host, static_cast<int64_t>(host.nbytes()), device.index());
  return {
      c10::Storage::use_byte_size_t(),
      host.nbytes(),
      c10::DataPtr(memory, block, &release_block, device),
      &allocator(),
      /*resizable=*/true};
}

inline Tensor adopt(const Tensor& host, c10::Device device) {
  return npu_tensor(adopt_storage(host.storage(), device), host);
}

} // namespace emulated_npu
