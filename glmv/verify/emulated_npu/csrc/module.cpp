// The extension module: registers the device with PyTorch when loaded, and is driven from device.py, operators.py,
// counting.py and collectives.py.
#include "autocast.h"
#include "collectives.h"
#include "counting.h"
#include "device.h"
#include "fallback.h"
#include "kernels.h"
#include "memory.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

namespace emulated_npu {
namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_kernels(library);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  register_autocast(library);
}

void configure(int devices, bool poison) {
  TORCH_CHECK(devices >= 1 && devices <= kMaxDevices, "the emulated machine has 1 to ", kMaxDevices, " devices");
  settings() = {devices, poison};
  c10::SetAllocator(kNpu, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("configure", &configure);
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", [](int index) {
    current_device() = checked({kNpu, static_cast<c10::DeviceIndex>(index)}).index();
  });
  module.def("host_view", &host_view, "A CPU tensor over the memory of an npu tensor; a CPU tensor as it is.");
  module.def("to_npu", [](const Tensor& host, int index) {
    return on_npu(host) ? host : adopt(host, {kNpu, static_cast<c10::DeviceIndex>(index)});
  });
  module.def("memory_now", [](int index) { return usage(index).now.load(); });
  module.def("memory_peak", [](int index) { return usage(index).peak.load(); });
  module.def("reset_memory_peak", [](int index) { usage(index).peak = usage(index).now.load(); });
  module.def("generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  module.def("count_call", [](const std::string& name) { counters().call(name); });
  module.def("count_sync", [](const std::string& cause) { counters().sync(cause); });
  module.def("calls", [] { return counters().calls(); });
  module.def("syncs", [] { return counters().syncs(); });
  module.def("collectives", [] { return counters().collectives(); });
  py::class_<HcclOverGloo, c10d::Backend, c10::intrusive_ptr<HcclOverGloo>>(module, "ProcessGroupHCCL")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
      .def_property_readonly("number", &HcclOverGloo::number)
      .def_property_readonly("gloo", &HcclOverGloo::gloo);
}

} // namespace
} // namespace emulated_npu
