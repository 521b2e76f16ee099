// What a program made the emulated device do: operator calls, moments where the host waits for it, collectives.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace emulated_npu {

using Counts = std::map<std::string, int64_t>;

class Counters {
 public:
  void call(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[name];
  }

  // `cause` is the operator that makes the host wait; some wait more than once.
  void sync(const std::string& cause, int64_t times = 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    syncs_[cause] += times;
  }

  void collective(const std::string& name, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = collectives_[name];
    ++entry.first;
    entry.second += bytes;
  }

  Counts calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

  Counts syncs() {
    std::lock_guard<std::mutex> lock(mutex_);
    return syncs_;
  }

  std::map<std::string, std::pair<int64_t, int64_t>> collectives() {
    std::lock_guard<std::mutex> lock(mutex_);
    return collectives_;
  }

 private:
  std::mutex mutex_;
  Counts calls_;
  Counts syncs_;
  std::map<std::string, std::pair<int64_t, int64_t>> collectives_;
};

inline Counters& counters() {
  static Counters* instance = new Counters; // never destroyed: autograd threads may outlive static destructors
  return *instance;
}

} // namespace emulated_npu
