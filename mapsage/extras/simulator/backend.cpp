// A simulated accelerator: PyTorch's PrivateUse1 device type, computed by the CPU's own kernels.
//
// A simulated tensor's storage is host memory that belongs to one of several devices. One boxed
// fallback serves every operator: it checks that all tensors are on one device, lends the CPU
// kernel views of the same memory, and puts what comes back on the device. Nothing is copied, so a
// step costs about what it costs on the CPU, and the numbers are the CPU's.
//
// Python reaches the settings and counters at the end of this file through ctypes.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "narrowing.h"
#include "random_streams.h"
#include "settings.h"

namespace {

using namespace sim;

// ---------------------------------------------------------------- accounts

struct Account {
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> peak{0};
};

std::array<Account, kMaxDevices> accounts;
std::atomic<int64_t> allocations{0};
thread_local int current_device = 0;

c10::Device device_at(int index) {
  return {kDevice, static_cast<c10::DeviceIndex>(index)};
}

// A driver that was in use cannot be used in a forked process.
std::atomic<bool> in_use{false};
std::atomic<bool> in_bad_fork{false};

void after_fork_in_child() {
  if (in_use && !profile.usable_after_fork) in_bad_fork = true;
}

void check_usable(int index) {
  TORCH_CHECK(!in_bad_fork, "Cannot re-initialize GCU in forked subprocess. To use GCU with "
              "multiprocessing, you must use the 'spawn' start method");
  in_use = true;
  TORCH_CHECK(index >= 0 && index < settings.devices, "gcu:", index, " does not exist: there are ",
              settings.devices, " simulated devices (MAPSAGE_SIM_DEVICES)");
  TORCH_CHECK(!settings.absent.count(index), "gcu:", index,
              " does not answer (simulated fault: MAPSAGE_SIM_FAULTS)");
}

std::string mib(int64_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// Enter `bytes` into a device's account, or fail as a full device does.
void charge(int device, int64_t bytes) {
  auto& account = accounts[device];
  const bool fails = ++allocations == settings.failing_allocation;
  const int64_t now = account.allocated += bytes;
  if (fails || (settings.memory > 0 && now > settings.memory)) {
    account.allocated -= bytes;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "GCU out of memory. Tried to allocate ", mib(bytes), ". gcu:",
        device, " has a total capacity of ",
        settings.memory ? mib(settings.memory) : std::string("no limit"), " of which ",
        settings.memory ? mib(settings.memory - now + bytes) : std::string("all"), " is free.",
        fails ? " (simulated fault: MAPSAGE_SIM_FAULTS)" : " (simulated: MAPSAGE_SIM_MEMORY)");
  }
  int64_t peak = account.peak;
  while (now > peak && !account.peak.compare_exchange_weak(peak, now)) {
  }
}

// ---------------------------------------------------------------- memory

// Host memory that is on a device's account until it is freed.
struct Block {
  c10::DataPtr host;
  int64_t bytes;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  accounts[block->device].allocated -= block->bytes;
  delete block;
}

c10::DataPtr put_on_device(c10::DataPtr host, size_t bytes, c10::Device device) {
  check_usable(device.index());
  charge(device.index(), static_cast<int64_t>(bytes));
  void* data = host.get();
  auto* block = new Block{std::move(host), static_cast<int64_t>(bytes), device.index()};
  return {data, block, &release, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return put_on_device(c10::GetCPUAllocator()->allocate(bytes), bytes,
                         device_at(current_device));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// Pinned host memory, by address: the end of each block.
std::mutex pinned_mutex;
std::map<uintptr_t, uintptr_t> pinned_blocks;

void unpin(void* context) {
  auto* host = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(reinterpret_cast<uintptr_t>(host->get()));
  }
  delete host;
}

bool is_pinned(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned_blocks.upper_bound(address);
  return after != pinned_blocks.begin() && address < std::prev(after)->second;
}

// Nothing is locked into memory. PyTorch asserts that what it pinned is pinned, so it is recorded.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    void* data = host->get();
    if (bytes > 0) {
      const auto address = reinterpret_cast<uintptr_t>(data);
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks[address] = address + bytes;
    }
    return {data, host, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

// ---------------------------------------------------------------- devices and streams

// There is one stream a device and everything on it is done when it is queued.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      check_usable(device.index());
      current_device = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings.devices);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = this_as_event();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

 private:
  void* this_as_event() const { return const_cast<Guard*>(this); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  // The first two override nothing in torch 2.6.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return settings.devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings.devices);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes && storage.nbytes()) {
      std::memcpy(host.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(put_on_device(std::move(host), bytes, storage.device()));
    storage.set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------- the fallback

// A tensor over `storage` with the dtype, shape and layout of `like`.
at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// A CPU storage over the memory of a device's storage, which must outlive it.
c10::Storage host_storage_over(const c10::Storage& storage) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), nullptr, [](void*) {}, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), /*resizable=*/true));
}

// The CPU tensor over the memory of a device's tensor.
at::Tensor host_copy_view(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  check_usable(tensor.device().index());
  return tensor_over(host_storage_over(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

void check_narrow(const at::Tensor& tensor, const std::string& op) {
  if (tensor.scalar_type() != at::kLong || tensor.numel() == 0 || !tensor.is_contiguous()) return;
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  const auto* values = tensor.const_data_ptr<int64_t>();  // host memory, whatever the device
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    TORCH_CHECK(values[i] <= limit && values[i] >= -limit - 1, op, " made the int64 value ",
                values[i], " on ", tensor.device(), ", which keeps 32 bits. Keep such numbers on "
                "the CPU (simulated strictness: MAPSAGE_SIM_STRICT)");
  }
}

// One call of an operator, lent to the CPU.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const auto name = schema.name();
    if (settings.refused_ops.count(name)) {
      refuse(name, "has no kernel on this device", "MAPSAGE_SIM_STRICT");
    }
    find_device();
    refuse_float64();
    refuse_unset_workspace();
    refuse_int64_arithmetic();
    refuse_mixed_precision();
    const auto count = schema.arguments().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); ++i) lend((*stack_)[i]);
    hide_nan();
    {
      std::optional<DrawFrom> stream;
      if (settings.own_streams && op_.hasTag(at::Tag::nondeterministic_seeded)) {
        stream.emplace(random_streams[device_.index()]);
      }
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    follow_changes();
    const auto returns = schema.returns().size();
    for (size_t i = stack_->size() - returns; i < stack_->size(); ++i) take_back((*stack_)[i]);
    refuse_wide_int64();
    narrow();
  }

 private:
  // Every tensor among the arguments, each with the argument's index.
  template <typename F>
  void for_each_tensor(F visit) const {
    const auto count = op_.schema().arguments().size();
    for (size_t i = 0; i < count; ++i) {
      const auto& value = (*stack_)[stack_->size() - count + i];
      if (value.isTensor()) {
        visit(value.toTensor(), i);
      } else if (value.isList()) {
        for (const auto& item : value.toListRef()) {
          if (item.isTensor()) visit(item.toTensor(), i);
        }
      }
    }
  }

  // The device of this call; PyTorch's own words where tensors disagree about it.
  void find_device() {
    const auto& schema = op_.schema();
    std::optional<c10::Device> first;
    for_each_tensor([&](const at::Tensor& tensor, size_t) {
      if (tensor.defined() && !first && tensor.device().type() == kDevice) {
        first = tensor.device();
      }
    });
    if (first) {
      // A scalar on the CPU goes anywhere, and so do indices.
      const bool takes_cpu_indices = schema.name().find("index") != std::string::npos;
      for_each_tensor([&](const at::Tensor& tensor, size_t i) {
        if (!tensor.defined() || tensor.device() == *first) return;
        if (tensor.is_cpu() && (tensor.dim() == 0 || takes_cpu_indices)) return;
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                    "devices, ", *first, " and ", tensor.device(),
                    "! (when checking argument for argument ", schema.arguments()[i].name(),
                    " in method ", schema.name(), ")");
      });
    } else {
      const auto count = schema.arguments().size();
      for (size_t i = stack_->size() - count; i < stack_->size(); ++i) {
        if ((*stack_)[i].isDevice()) first = (*stack_)[i].toDevice();
      }
    }
    device_ = first && first->type() == kDevice && first->has_index() ? *first
                                                                     : device_at(current_device);
    check_usable(device_.index());
  }

  void lend(c10::IValue& value) {
    if (value.isTensor()) {
      value = host_view(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(host_view(tensor));
      value = c10::IValue(std::move(tensors));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional<at::Tensor>(host_view(*tensor)) : std::nullopt);
      }
      value = c10::IValue(std::move(tensors));
    } else if (value.isStorage()) {
      if (value.toStorage().device_type() == kDevice) value = host_storage(value.toStorage());
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kDevice) value = c10::Device(c10::kCPU);
    }
  }

  // One CPU storage for each device storage, so that views stay views of each other.
  c10::Storage host_storage(const c10::Storage& storage) {
    auto found = lent_.find(storage.unsafeGetStorageImpl());
    if (found != lent_.end()) return found->second;
    auto host = host_storage_over(storage);
    lent_.emplace(storage.unsafeGetStorageImpl(), host);
    owners_.emplace(host.unsafeGetStorageImpl(), storage);
    return host;
  }

  at::Tensor host_view(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    auto host = tensor_over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    views_.emplace_back(tensor, host);
    return host;
  }

  // Carry over what the kernel did to its arguments other than writing their memory: resizing an
  // output, exchanging a storage.
  void follow_changes() {
    for (auto& [host, storage] : owners_) {
      if (host->data() != storage.data()) {
        const auto bytes = host->nbytes();
        storage.set_data_ptr_noswap(put_on_device(
            host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU))), bytes, device_));
        storage.set_nbytes(bytes);
      }
    }
    for (auto& [tensor, host] : views_) {
      auto* impl = tensor.unsafeGetTensorImpl();
      if (lent_.at(original_storage(tensor)).unsafeGetStorageImpl() !=
          host.storage().unsafeGetStorageImpl()) {
        impl->set_storage_keep_dtype(device_storage(host.storage()));
      }
      if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides() ||
          tensor.storage_offset() != host.storage_offset()) {
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  static c10::StorageImpl* original_storage(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  void take_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = device_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) {
        tensors.push_back(device_tensor(tensor));
      }
      value = c10::IValue(std::move(tensors));
    }
  }

  at::Tensor device_tensor(const at::Tensor& host) {
    if (!host.defined() || !host.is_cpu()) return host;
    for (auto& [tensor, view] : views_) {
      if (view.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) return tensor;
    }
    auto result =
        tensor_over(device_storage(host.storage()), c10::DispatchKey::PrivateUse1, host);
    results_.push_back(result);
    return result;
  }

  // The device storage behind a CPU one: the one it was lent from, or a new one that takes the
  // memory over.
  c10::Storage device_storage(const c10::Storage& host) {
    auto found = owners_.find(host.unsafeGetStorageImpl());
    if (found != owners_.end()) return found->second;
    const auto bytes = host.nbytes();
    auto memory = host.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        put_on_device(std::move(memory), bytes, device_), &allocator, /*resizable=*/true));
    owners_.emplace(host.unsafeGetStorageImpl(), storage);
    kept_.push_back(host);
    return storage;
  }

  // The vendor keeps 64-bit numbers in 32 bits. What would lose precision there fails here.
  void refuse_float64() const {
    if (!settings.refuse_float64 || moves_data_only()) return;
    for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      TORCH_CHECK(!tensor.defined() || tensor.scalar_type() != at::kDouble ||
                      tensor.device().type() != kDevice,
                  op_.schema().name(), " was given a float64 tensor (argument ",
                  op_.schema().arguments()[i].name(), ") on ", device_, ", which computes it in "
                  "float32. Use float32, or compute on the CPU (simulated strictness: "
                  "MAPSAGE_SIM_STRICT)");
    });
  }

  // CUDA's matrix products refuse to run deterministically without this variable; the words are
  // PyTorch's.
  void refuse_unset_workspace() const {
    static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm",
                                                   "aten::baddbmm", "aten::linear"};
    if (!settings.needs_workspace_setting || !at::globalContext().deterministicAlgorithms() ||
        !products.count(op_.schema().name())) {
      return;
    }
    const char* value = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    const std::string found = value ? value : "";
    TORCH_CHECK(found == ":4096:8" || found == ":16:8",
                "Deterministic behavior was enabled with either "
                "`torch.use_deterministic_algorithms(True)` or "
                "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
                "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable "
                "deterministic behavior in this case, you must set an environment variable before "
                "running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
                "CUBLAS_WORKSPACE_CONFIG=:16:8 (simulated strictness: MAPSAGE_SIM_STRICT)");
  }

  void refuse_wide_int64() const {
    if (!settings.refuse_wide_int64 || moves_data_only()) return;
    const auto& name = op_.schema().name();
    for (const auto& result : results_) check_narrow(result, name);
    if (op_.schema().is_mutable()) {
      for (const auto& [tensor, host] : views_) check_narrow(tensor, name);
    }
  }

  c10::IValue& argument(size_t i) const {
    return (*stack_)[stack_->size() - op_.schema().arguments().size() + i];
  }

  // With int64 whole on a card, its kernels still do not compute it.
  void refuse_int64_arithmetic() const {
    static const std::set<std::string> arithmetic = {
        "aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::max", "aten::masked_fill",
        "aten::masked_fill_"};
    const auto& name = op_.schema().name();
    if (profile.int64_arithmetic || !arithmetic.count(name)) return;
    bool has_int64 = false, all_integral = true;
    for_each_tensor([&](const at::Tensor& tensor, size_t) {
      if (!tensor.defined()) return;
      has_int64 |= tensor.device().type() == kDevice && tensor.scalar_type() == at::kLong;
      all_integral &= at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
    });
    if (has_int64 && all_integral) refuse(name, "int64 tensors are not supported");
  }

  // sum, cumsum and prod compute in the data type of their input.
  void refuse_mixed_precision() const {
    static const std::set<std::string> reductions = {"aten::sum", "aten::cumsum", "aten::prod"};
    const auto& schema = op_.schema();
    if (profile.mixed_precision_sum || !reductions.count(schema.name())) return;
    const auto dtype = schema.argumentIndexWithName("dtype");
    if (!dtype || argument(*dtype).isNone()) return;
    const auto from = argument(0).toTensor().scalar_type();
    const auto to = argument(*dtype).toScalarType();
    if (from != to && at::isFloatingType(from) && at::isFloatingType(to)) {
      refuse(schema.name(), std::string("dtype ") + c10::toString(to) + " of a tensor of " +
             c10::toString(from) + " is not supported");
    }
  }

  // max and min take no notice of NaN; numbers of which none is left are infinite.
  void hide_nan() const {
    const auto& name = op_.schema().name();
    const bool is_max = name == "aten::max";
    if (profile.max_of_nan_is_nan || !(is_max || name == "aten::min")) return;
    const auto values = argument(0).toTensor();
    if (!at::isFloatingType(values.scalar_type())) return;
    const auto is_nan = values.isnan();
    if (!is_nan.any().item<bool>()) return;
    const double infinity = std::numeric_limits<double>::infinity();
    argument(0) = values.masked_fill(is_nan, is_max ? -infinity : infinity);
  }

  void narrow() const {
    if (moves_data_only()) return;
    const auto how = op_.schema().name() == "aten::fill_" ? Narrowing::kClamp : Narrowing::kWrap;
    for (const auto& result : results_) narrow_host(host_copy_view(result), how);
    if (op_.schema().is_mutable()) {
      // The memory of an output that was resized is no longer that of its view.
      for (const auto& [tensor, host] : views_) narrow_host(host_copy_view(tensor), how);
    }
  }

  bool moves_data_only() const {
    static const std::set<std::string> movers = {
        "aten::_local_scalar_dense", "aten::clone", "aten::zero_", "aten::resize_", "aten::set_",
        "aten::empty", "aten::empty_strided"};
    const auto& schema = op_.schema();
    if (movers.count(schema.name())) return true;
    for (const auto& value : schema.returns()) {  // a view
      if (value.alias_info() && !value.alias_info()->isWrite()) return true;
    }
    return false;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  c10::Device device_ = device_at(0);
  std::unordered_map<c10::StorageImpl*, c10::Storage> lent_;    // device's to CPU's
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_;  // CPU's to device's
  std::vector<std::pair<at::Tensor, at::Tensor>> views_;        // device's and CPU's
  std::vector<at::Tensor> results_;
  std::vector<c10::Storage> kept_;  // keeps the keys of owners_ alive
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, stack).run();
}

// Convolution picks its kernel by device type, and has two names of its own for other devices.
void run_convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_host(op, stack);
}

void run_convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // (grad_output, input, weight, [bias_sizes], stride, padding, dilation, transposed,
  //  output_padding, groups, output_mask)
  const auto first = stack->size() - 10;
  const auto weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const auto groups = (*stack)[first + 8].toInt();
  const auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(first) + 3,
                c10::IValue(std::vector<int64_t>{channels}));
  run_on_host(op, stack);
}

// A copy is the one thing that may cross devices.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const auto host = host_copy_view(to);
  host.copy_(host_copy_view(from));
  if (!to.is_cpu()) {
    if (settings.refuse_wide_int64) check_narrow(to, "aten::copy_");
    narrow_host(host, Narrowing::kWrap);
  }
  return to;
}

at::Tensor view_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!profile.dtype_views && dtype != tensor.scalar_type()) {
    refuse("aten::view", std::string("a view of ") + c10::toString(tensor.scalar_type()) +
           " memory as " + c10::toString(dtype) + " is not supported; compute it on the CPU");
  }
  return at::native::view_dtype(tensor, dtype);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("view.dtype", &view_dtype);
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
  // Of these the CPU has a kernel of one piece, and PyTorch composes them of other operators where
  // a device has none, with other last bits. A test finds those that are missing here.
  for (const char* name : {"_stack", "addr", "all.dims", "any.dims", "linalg__powsum",
                           "mish_backward", "native_channel_shuffle", "native_group_norm",
                           "native_layer_norm", "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// ---------------------------------------------------------------- autocast

// PyTorch's own lists of what runs in lower precision; they are registered a backend.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;  // the signatures in PyTorch's macros name its types without it
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

// ---------------------------------------------------------------- what Python calls

extern "C" {

void mapsage_sim_configure(int devices, int64_t memory, int64_t failing_allocation,
                           uint64_t absent, int refuse_float64, int refuse_wide_int64,
                           int needs_workspace_setting, int own_streams,
                           const char* refused_ops) {
  settings.devices = devices;
  settings.memory = memory;
  settings.failing_allocation = failing_allocation;
  settings.absent.clear();
  for (int i = 0; i < kMaxDevices; ++i) {
    if (absent >> i & 1) settings.absent.insert(i);
  }
  settings.refuse_float64 = refuse_float64;
  settings.refuse_wide_int64 = refuse_wide_int64;
  settings.needs_workspace_setting = needs_workspace_setting;
  settings.own_streams = own_streams;
  settings.refused_ops.clear();
  std::string name;
  for (const char* at = refused_ops; *at; ++at) {
    if (*at == ',') {
      settings.refused_ops.insert(name);
      name.clear();
    } else {
      name += *at;
    }
  }
  if (!name.empty()) settings.refused_ops.insert(name);
}

void mapsage_sim_set_profile(int int64_wraps, int float64_narrows, int int64_arithmetic,
                             int mixed_precision_sum, int max_of_nan_is_nan, int dtype_views,
                             int usable_after_fork) {
  profile = {int64_wraps != 0,         float64_narrows != 0,   int64_arithmetic != 0,
             mixed_precision_sum != 0, max_of_nan_is_nan != 0, dtype_views != 0,
             usable_after_fork != 0};
}

void mapsage_sim_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, &after_fork_in_child);
}

// Count this process as one that uses the devices.
void mapsage_sim_use() { in_use = true; }
int mapsage_sim_is_in_use() { return in_use; }
int mapsage_sim_is_in_bad_fork() { return in_bad_fork; }

int mapsage_sim_is_usable(int device) {
  return device >= 0 && device < settings.devices && !settings.absent.count(device);
}
int mapsage_sim_current_device() { return current_device; }
void mapsage_sim_set_device(int device) { current_device = device; }
int64_t mapsage_sim_allocated(int device) { return accounts[device].allocated; }
int64_t mapsage_sim_peak(int device) { return accounts[device].peak; }
void mapsage_sim_seed(int device, uint64_t seed) { set_seed(device, seed); }
uint64_t mapsage_sim_initial_seed(int device) { return seed_of(device); }
// Bytes of a generator's state, which is copied into `bytes` unless that is null.
int64_t mapsage_sim_get_rng_state(int device, uint8_t* bytes) {
  return get_random_state(device, bytes);
}
int mapsage_sim_set_rng_state(int device, const uint8_t* bytes) {
  return set_random_state(device, bytes);
}
void mapsage_sim_reset_peak(int device) {
  accounts[device].peak = accounts[device].allocated.load();
}

}  // extern "C"
