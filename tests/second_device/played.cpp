// What torch asks a device type for in C++: how many devices there are, which of them and which of their streams is the
// calling thread's, memory for storages that are copied as such, and which host memory is pinned. Python can give torch a
// guard too, but of one device with one stream, and autograd has a thread for each device.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};

// What follows what is enqueued, where that is done later; see late.py. Events are numbers.
struct Later {
  int64_t (*record)(int device, int64_t stream);
  void (*block)(int64_t event, int device, int64_t stream);
  int (*passed)(int64_t event);
  void (*wait)(int64_t event);
};
Later later = {};

void use(void* start, const c10::Stream& stream);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no device ", device);
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, {TYPE, index}, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {TYPE, device.has_index() ? device.index() : current_device});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  // Unless there is a `later`, what is enqueued is done at once, so there is nothing to wait for.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (later.record) *event = reinterpret_cast<void*>(later.record(stream.device_index(), stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (later.block && event) later.block(reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !later.passed || !event || later.passed(reinterpret_cast<int64_t>(event));
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream& stream) const override {
    return !later.record || later.passed(later.record(stream.device_index(), stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (later.record) later.wait(later.record(stream.device_index(), stream.id()));
  }
  void synchronizeEvent(void* event) const override {
    if (later.wait && event) later.wait(reinterpret_cast<int64_t>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    use(memory.get(), stream);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned;  // first address and bytes of each span

void pin(void* start, size_t bytes) {
  std::lock_guard<std::mutex> held(pinned_lock);
  pinned[reinterpret_cast<uintptr_t>(start)] = bytes;
}

void unpin(void* start) {
  std::lock_guard<std::mutex> held(pinned_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(start));
}

bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (after == pinned.begin()) return false;
  auto span = std::prev(after);
  return reinterpret_cast<uintptr_t>(at) < span->first + span->second;
}

void free_memory(void* start) { std::free(start); }

// Where work is done later, memory that was given back is what its stream is given next, as CUDA's allocator does it:
// whoever else still uses it finds other numbers there. None of it goes back to the C library.
using Place = std::tuple<int, int64_t, size_t>;
std::mutex pool_lock;
std::map<Place, std::vector<void*>> given_back;
std::map<void*, Place> taken_from;
std::set<void*> used_elsewhere;

// Autograd says that another stream uses the memory, too. Such memory is not given to anyone again.
void use(void* start, const c10::Stream& stream) {
  std::lock_guard<std::mutex> held(pool_lock);
  auto known = taken_from.find(start);
  if (known != taken_from.end() && std::get<1>(known->second) != stream.id()) used_elsewhere.insert(start);
}

void* take(size_t bytes) {
  Place place{current_device, current_stream[current_device], (bytes + 512) / 512 * 512};
  std::lock_guard<std::mutex> held(pool_lock);
  auto& blocks = given_back[place];
  void* start = blocks.empty() ? std::aligned_alloc(512, std::get<2>(place)) : blocks.back();
  if (!blocks.empty()) blocks.pop_back();
  taken_from[start] = place;
  return start;
}

void give_back(void* start) {
  std::lock_guard<std::mutex> held(pool_lock);
  if (!used_elsewhere.count(start)) given_back[taken_from[start]].push_back(start);
}

void free_pinned(void* start) {
  unpin(start);
  std::free(start);
}

struct Memory final : c10::Allocator {
  explicit Memory(bool on_host) : on_host(on_host) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (!on_host && later.record) {
      void* start = take(bytes);
      return {start, start, &give_back, {TYPE, current_device}};
    }
    void* start = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!on_host) return {start, start, &free_memory, {TYPE, current_device}};
    pin(start, bytes);
    return {start, start, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return on_host ? &free_pinned : &free_memory; }
  void copy_data(void* to, const void* of, size_t bytes) const override { default_copy_data(to, of, bytes); }
  bool on_host;
};

Memory device_memory(false), pinned_memory(true);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current_device, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

Hooks hooks;

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

extern "C" {
void played_register() {
  c10::SetAllocator(TYPE, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void played_later(Later functions) { later = functions; }
void played_pin(void* start, size_t bytes) { pin(start, bytes); }
void played_unpin(void* start) { unpin(start); }
int played_devices() { return DEVICES; }
int played_device() { return current_device; }
void played_set_device(int index) { current_device = static_cast<c10::DeviceIndex>(index); }
int64_t played_stream(int index) { return current_stream[index]; }
void played_set_stream(int index, int64_t id) { current_stream[index] = id; }
}
