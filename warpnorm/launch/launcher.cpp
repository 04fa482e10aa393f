/* Calls that were seen before, without Python: a look-up by whatever decides about a call, its allocations and the launch,
   forward and backward. What is not found here, and what is not plain, is Python's (`repeat.py`), which tells `remember` of
   what it prepared. Nothing is ever forgotten: graphs and autograd's nodes may refer to it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#if __has_include(<cuda.h>)
#include <cuda.h>
#define HAS_CUDA 1
#endif

namespace {

#ifdef HAS_CUDA
/* Of the driver, which PyTorch has loaded. */
template <typename Function>
Function driver(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  TORCH_CHECK(found != nullptr, "CUDA's driver has no ", name);
  return reinterpret_cast<Function>(found);
}
#endif

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t MOST_WORDS = 128, MOST_OPERANDS = 16, MOST_ENTRIES = 16384, MOST_MAILBOXES = 256, MOST_LENDERS = 64;
constexpr int64_t APART = 256;  // bytes, of what lies in memory that a stream lends

/* Whatever decides about a call, in words. */
struct Key {
  std::array<int64_t, MOST_WORDS> words;
  size_t size = 0;
  bool is_full = false;

  void add(int64_t word) {
    if (size < MOST_WORDS) words[size++] = word;
    else is_full = true;
  }

  /* False if the tensor is not dense memory of a CPU or of CUDA: nested, negated when it is read, wrapped, freed, empty. */
  bool add(const at::Tensor& t) {
    using c10::DispatchKey;
    using c10::DispatchKeySet;
    // of these, inference tensors lack the first
    const auto keys = t.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
    if ((keys != DispatchKeySet(DispatchKey::CPU) && keys != DispatchKeySet(DispatchKey::CUDA)) || !t.has_storage())
      return false;
    // not the tensor's address, which is an offset from nothing where a storage was freed
    if (t.numel() == 0 || t.storage().data() == nullptr) return false;
    const void* address = t.const_data_ptr();
    const auto sizes = t.sizes(), strides = t.strides();
    const auto place = reinterpret_cast<uintptr_t>(address);
    const int64_t alignment = place % 16 == 0 ? 3 : place % 8 == 0 ? 2 : place % 4 == 0;  // problem.py, ALIGNMENTS
    add(static_cast<int64_t>(sizes.size()) << 32 | static_cast<int64_t>(t.scalar_type()) << 24 |
        static_cast<int64_t>(t.get_device() + 1) << 2 | alignment);  // -1 is the CPU
    for (const auto n : sizes) add(n);
    for (const auto n : strides) add(n);
    return true;
  }

  bool operator==(const Key& other) const {
    return size == other.size && std::memcmp(words.data(), other.words.data(), size * sizeof(int64_t)) == 0;
  }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size;
    for (size_t i = 0; i < key.size; i++) {
      hash = (hash ^ static_cast<uint64_t>(key.words[i])) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

/* Not all programs of a launch can run at the same time. Nothing was computed, and Python knows another way. */
struct Refused {};

/* One launch: of a kernel, or of native code by the threads of a pool. Its pointers are those of the tensors at hand, and of
   its numbers some follow from one that each call has of its own. */
struct Launch {
  enum { VALUE = -1, FLOAT = -2, DOUBLE = -3 };
  struct Param {
    int64_t slot;  // of a tensor; or one of the above: a value, or base + slope times the number of the call
    int64_t value;
    double base, slope;
  };
  void* function = nullptr;
  std::vector<Param> params;
  unsigned grid[3] = {1, 1, 1}, threads = 0, shared = 0;
  bool is_chained = false, is_cooperative = false;

  int (*pool)(void*, void**, const int64_t*, const double*, int64_t) = nullptr;
  const int64_t* numbers = nullptr;
  const double* reals = nullptr;
  int64_t most_parts = 1;
  double eps = 0.0, ratio = 0.0;  // where it averages by the number of the call, and corrects the variance so

  void operator()(const std::vector<void*>& pointers, void* stream, double number) const {
    if (pool != nullptr) {
      std::vector<void*> given;
      for (const auto& param : params) given.push_back(pointers[param.slot]);
      const auto parts = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), most_parts));
      const double averaging[] = {eps, 1.0 - number, number, number * ratio};
      if (pool(function, given.data(), numbers, ratio == 0.0 ? reals : averaging, parts) != 0)
        C10_THROW_ERROR(OutOfMemoryError, "there is no memory for the elements of a row that native code has to keep");
      return;
    }
#ifdef HAS_CUDA
    static const auto launch =
        driver<CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**)>("cuLaunchKernelEx");
    std::array<int64_t, 2 * MOST_WORDS> values;
    std::array<void*, 2 * MOST_WORDS> places;
    for (size_t i = 0; i < params.size(); i++) {
      const auto& param = params[i];
      const double real = param.base + param.slope * number;
      const float single = static_cast<float>(real);
      places[i] = &values[i];
      if (param.slot >= 0) values[i] = reinterpret_cast<int64_t>(pointers[param.slot]);
      else if (param.slot == FLOAT) std::memcpy(&values[i], &single, sizeof(single));
      else if (param.slot == DOUBLE) std::memcpy(&values[i], &real, sizeof(real));
      else values[i] = param.value;
    }
    CUlaunchAttribute attributes[2];
    std::memset(attributes, 0, sizeof(attributes));
    unsigned count = 0;
    if (is_chained) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (is_cooperative) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attributes[count++].value.cooperative = 1;
    }
    CUlaunchConfig config;
    std::memset(&config, 0, sizeof(config));
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
    config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared;
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = attributes;
    config.numAttrs = count;
    const auto status = launch(&config, static_cast<CUfunction>(function), places.data(), nullptr);
    if (status == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE || (is_cooperative && status == CUDA_ERROR_NOT_SUPPORTED))
      throw Refused();
    TORCH_CHECK(status == CUDA_SUCCESS, "the launch of a kernel failed: CUDA error ", static_cast<int>(status));
#else
    TORCH_CHECK(false, "built without CUDA");
#endif
  }
};

at::Tensor empty(c10::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& beside) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(beside.device()));
}

/* Memory of large results on a CPU, whose pages cost as much time as a norm where they are fresh: when a result is gone it is
   kept for the next of its size. Whoever finds another thread here goes without: so does a forked child, if that thread is
   not its own. */
struct Keeper {
  struct Block {
    c10::DataPtr memory;
    size_t size, most;  // bytes; of all that may be kept
  };
  using Blocks = std::deque<std::unique_ptr<Block>>;
  std::mutex lock;
  Blocks idle;  // the one that was used last is the last
  size_t bytes = 0;  // of these
  std::atomic<size_t> large{0};  // bytes from which a result is large; none: nobody said
  void (*ask)(void*, int64_t, int64_t) = nullptr;  // for huge pages, which so many threads share

  static Keeper& all() {
    static auto* keeper = new Keeper();
    return *keeper;
  }

  static c10::Allocator* allocator();

  bool takes(size_t size, size_t most) const {
    const auto& context = at::globalContext();
    const bool is_filled = context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
    return large != 0 && size >= large && size <= most && !is_filled;
  }

  /* `parts` threads share the pages where these are fresh. */
  c10::Storage storage(size_t size, size_t most, int64_t parts) {
    auto block = kept(size);
    if (block == nullptr) {
      block = std::make_unique<Block>(Block{c10::GetCPUAllocator()->allocate(size), size, most});
      ask(block->memory.get(), static_cast<int64_t>(size), parts);
    }
    block->most = most;
    void* data = block->memory.get();
    c10::DataPtr memory(data, block.release(), &Keeper::take_back, c10::Device(c10::DeviceType::CPU));
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(memory), allocator(), true);
  }

  std::unique_ptr<Block> kept(size_t size) {
    const std::unique_lock<std::mutex> guard(lock, std::try_to_lock);
    if (!guard.owns_lock()) return nullptr;
    const auto found = std::find_if(idle.rbegin(), idle.rend(), [=](const auto& block) { return block->size == size; });
    if (found == idle.rend()) return nullptr;
    auto block = std::move(*found);
    idle.erase(std::next(found).base());
    bytes -= size;
    return block;
  }

  static void take_back(void* context) {
    auto& keeper = all();
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    Blocks gone;  // after the lock is free
    const std::unique_lock<std::mutex> guard(keeper.lock, std::try_to_lock);
    if (!guard.owns_lock() || block->size > block->most) return;
    keeper.leave(block->most - block->size, gone);
    keeper.bytes += block->size;
    keeper.idle.push_back(std::move(block));
  }

  /* No more than so many bytes stay idle: what was used longest ago goes first. */
  void leave(size_t most, Blocks& gone) {
    while (bytes > most) {
      bytes -= idle.front()->size;
      gone.push_back(std::move(idle.front()));
      idle.pop_front();
    }
  }
};

/* Of storages with such memory: PyTorch's, which knows that this may be shared until it is written. */
struct KeptAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return c10::GetCPUAllocator()->allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return data.get_deleter() == &Keeper::take_back || c10::Allocator::is_simple_data_ptr(data);
  }
};

c10::Allocator* Keeper::allocator() {
  static auto* kept = new KeptAllocator();
  return kept;
}

at::Tensor new_mailbox(const std::vector<int64_t>& sizes, const at::Tensor& beside);
at::Tensor new_lender(const at::Tensor& beside);
bool is_capturing(void* stream);

/* A megabyte that a stream keeps, for whatever calls leave in memory that their results do not need, one call at a time. */
struct Lender {
  std::unique_lock<std::mutex> guard;  // held until the launches are on their way
  at::Tensor memory;
  int64_t used = 0;

  /* Nothing where so many bytes are too many, or a graph would have them. */
  Lender(int64_t bytes, const at::Tensor& beside, void* stream) {
    if (bytes == 0 || bytes > largest_loan || beside.is_cpu() || is_capturing(stream)) return;
    static std::mutex lock;
    static auto* lenders = new std::map<std::pair<int64_t, void*>, at::Tensor>();
    const auto key = std::make_pair(static_cast<int64_t>(beside.get_device()), stream);
    guard = std::unique_lock<std::mutex>(lock);
    auto found = lenders->find(key);
    if (found == lenders->end()) {
      guard.unlock();  // Python, whose lock is not waited for with this one
      const auto made = new_lender(beside);
      guard.lock();
      if (lenders->size() >= MOST_LENDERS) lenders->clear();
      found = lenders->emplace(key, made).first;
    }
    memory = found->second;
  }

  static int64_t padded(int64_t bytes) { return (bytes + APART - 1) / APART * APART; }

  /* The next so many bytes. */
  at::Tensor operator()(int64_t bytes) {
    const auto start = used;
    used += padded(bytes);
    return memory.narrow(0, start, bytes);
  }

  static int64_t largest_loan;
};
int64_t Lender::largest_loan = 0;

/* What the programs of a call tell each other by: parts of one allocation, or the mailbox of a stream, which holds what was
   told before, so that programs know what is new. */
struct Shared {
  enum { EMPTY = 0, ZEROS = 1, MAILBOX = 2 };
  std::vector<int64_t> sizes;  // of the parts; of a mailbox, its size, and what else tells apart who may have it
  at::ScalarType dtype = at::kByte;
  int64_t kind = EMPTY;

  bool is_mailbox() const { return kind == MAILBOX && !sizes.empty(); }

  int64_t bytes() const {
    return kind == MAILBOX ? 0 : std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) * c10::elementSize(dtype);
  }

  /* Adds where the parts begin; whoever uses them keeps what is returned. */
  at::Tensor operator()(
      std::vector<void*>& pointers, const at::Tensor& beside, void* stream, Lender* lender = nullptr) const {
    if (sizes.empty()) return at::Tensor();
    if (kind == MAILBOX) {
      auto box = mailbox(beside, stream);
      pointers.push_back(box.mutable_data_ptr());
      return box;
    }
    const auto options = at::TensorOptions().dtype(at::kByte).device(beside.device());
    auto all = lender == nullptr ? at::empty({bytes()}, options) : (*lender)(bytes());
    if (kind == ZEROS) all.view(dtype).zero_();
    auto* next = static_cast<char*>(all.mutable_data_ptr());
    for (const auto size : sizes) {
      pointers.push_back(next);
      next += size * static_cast<int64_t>(c10::elementSize(dtype));
    }
    return all;
  }

  at::Tensor mailbox(const at::Tensor& beside, void* stream) const {
    static std::mutex lock;
    static auto* boxes = new std::map<std::vector<int64_t>, at::Tensor>();
    auto key = sizes;
    key.push_back(beside.get_device()), key.push_back(reinterpret_cast<int64_t>(stream));
    {
      const std::lock_guard<std::mutex> guard(lock);
      const auto found = boxes->find(key);
      if (found != boxes->end()) return found->second;
    }
    const auto made = new_mailbox(sizes, beside);  // Python's, whose lock is not waited for with this one
    const std::lock_guard<std::mutex> guard(lock);
    if (boxes->size() >= MOST_MAILBOXES) boxes->clear();
    return boxes->emplace(key, made).first->second;
  }
};

struct Backward {
  std::vector<int64_t> wanted;                 // of what is kept, that whose gradients it writes
  std::vector<int64_t> partials;               // the sizes of what the first launch leaves for the second
  std::vector<Launch> launches;
  Shared shared;
};

struct Entry {
  struct Output {
    std::vector<int64_t> sizes, strides;       // no strides: they are dense
    at::ScalarType dtype;
  };
  std::vector<Output> outputs;
  bool is_tuple = false;                       // what is returned
  bool has_formats = false;                    // gradients lie in memory as what they are of
  bool is_refused = false;                     // by the device
  std::vector<at::Tensor> scratch;             // where statistics go that nobody reads; or none, and they are new each time
  int64_t statistics = 0, kept_statistics = 0, rows = 0;  // the first ones are kept for backward
  at::ScalarType compute = at::kFloat;
  std::vector<Launch> forward;
  Shared shared;
  std::vector<int64_t> written;                // operands that are averaged into
  PyObject* repeat = nullptr;                  // Python's: what runs backward where that is not plain; or None
  PyObject* owner = nullptr;                   // of whatever the launch points to
  size_t operands = 0;
  std::vector<int64_t> saved;                  // what is kept for backward: operands, or from -1 down outputs
  int64_t differentiable = 0;                  // bits: operands whose gradients that gives
  bool is_alone = false;                       // a norm, without more: backward may be remembered too
  std::unordered_map<Key, Backward, Hash> backward;
};

std::unordered_map<Key, std::unique_ptr<Entry>, Hash>& entries() {
  static auto* all = new std::unordered_map<Key, std::unique_ptr<Entry>, Hash>();
  return *all;
}

PyObject *parameter_type, *device_context_type, *settings_names, *current_name, *raw_stream, *slow_backward, *slow_mailbox, *slow_lender;
PyObject* hooks = nullptr;  // of launches: who owns them

PyObject* settings_now() { return PyDict_GetItem(settings_names, current_name); }

/* Whether functions are looked at by more than a default device, which says where new tensors lie. */
bool has_modes() {
  if (!at::impl::torch_function_mode_enabled()) return false;
  for (int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); i++) {
    PyObject* mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != device_context_type) return true;
  }
  return false;
}

/* Whether nothing traces or transforms calls: it would be among the keys that the dispatcher includes, or a level of forward
   gradients. Autocast is part of a key, and of what is excluded only autograd counts, below. */
bool is_plain() {
  using c10::DispatchKey;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  const auto usual = c10::DispatchKeySet({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  return (included - usual - c10::autocast_dispatch_keyset).empty() && !has_modes() &&
         torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr;
}

bool records_gradients() {
  return c10::GradMode::is_enabled() && !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

/* As Python makes it, of (its size, teams, programs of one, words of a message), for the current stream. */
at::Tensor new_mailbox(const std::vector<int64_t>& sizes, const at::Tensor& beside) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr device(THPDevice_New(beside.device()));
  if (!device) raise();
  THPObjectPtr found(PyObject_CallFunction(
      slow_mailbox, "LLLO", static_cast<long long>(sizes[1]), static_cast<long long>(sizes[2]),
      static_cast<long long>(sizes[3]), device.get()));
  if (!found) raise();
  return THPVariable_Unpack(found.get());
}

/* The same of memory that the current stream lends. */
at::Tensor new_lender(const at::Tensor& beside) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr device(THPDevice_New(beside.device()));
  if (!device) raise();
  THPObjectPtr found(PyObject_CallOneArg(slow_lender, device.get()));
  if (!found) raise();
  return THPVariable_Unpack(found.get());
}

/* Whether a profiler wants to be told of launches by Triton, which would not see these. */
bool has_hooks() {
  if (hooks == nullptr) return false;
  static PyObject* const names[] = {
      PyUnicode_InternFromString("launch_enter_hook"), PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* const calls = PyUnicode_InternFromString("calls");
  for (PyObject* name : names) {
    THPObjectPtr hook(PyObject_GetAttr(hooks, name));
    if (!hook) raise();
    if (hook.get() == Py_None) continue;
    THPObjectPtr list(PyObject_GetAttr(hook.get(), calls));
    if (!list) PyErr_Clear();
    if (!list || !PyList_Check(list.get()) || PyList_GET_SIZE(list.get()) > 0) return true;
  }
  return false;
}

/* Whether this thread has a context of CUDA, which its first work by PyTorch or Triton makes. */
bool has_context() {
#ifdef HAS_CUDA
  static const auto current = driver<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  return current(&context) == CUDA_SUCCESS && context != nullptr;
#else
  return false;
#endif
}

/* The current stream of a GPU that is the current one. */
std::optional<void*> stream_of(const at::Tensor& input) {
  if (input.is_cpu()) return nullptr;
  if (!has_context()) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(input.device().type());
  if (guard.getDevice() != input.device() || has_hooks()) return std::nullopt;
  PyObject* index = PyLong_FromLong(input.get_device());
  PyObject* found = index == nullptr ? nullptr : PyObject_CallOneArg(raw_stream, index);
  Py_XDECREF(index);
  if (found == nullptr) raise();
  void* stream = PyLong_AsVoidPtr(found);
  Py_DECREF(found);
  return stream;
}

/* Whether a stream records a graph, which may be replayed beside anything: it must have mailboxes of its own. */
bool is_capturing(void* stream) {
#ifdef HAS_CUDA
  static const auto ask = driver<CUresult (*)(CUstream, CUstreamCaptureStatus*)>("cuStreamIsCapturing");
  CUstreamCaptureStatus status;
  return ask(static_cast<CUstream>(stream), &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
#else
  return false;
#endif
}

struct Run {
  Entry* entry;
  void* stream;
  double number;
  size_t kept = 0;  // bytes of results that may be kept
};

/* Bytes of large results that may be kept, by the settings as they are now. */
size_t kept_now() {
  static PyObject* const name = PyUnicode_InternFromString("keep_bytes");
  THPObjectPtr bytes(PyObject_GetAttr(settings_now(), name));
  if (!bytes) raise();
  const auto kept = PyLong_AsSize_t(bytes.get());
  if (PyErr_Occurred()) raise();
  return kept;
}

/* `is_scattered`: threads will write here and there. */
at::Tensor new_output(const Entry::Output& output, const at::Tensor& beside, size_t kept, bool is_scattered) {
  const auto& [sizes, strides, dtype] = output;
  auto& keeper = Keeper::all();
  const auto itemsize = c10::elementSize(dtype);
  const auto size = strides.empty() ? at::detail::computeStorageNbytesContiguous(sizes, itemsize)
                                    : at::detail::computeStorageNbytes(sizes, strides, itemsize);
  if (!beside.is_cpu() || !keeper.takes(size, kept)) {
    const auto options = at::TensorOptions().dtype(dtype).device(beside.device());
    return strides.empty() ? at::empty(sizes, options) : at::empty_strided(sizes, strides, options);
  }
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      keeper.storage(size, kept, is_scattered ? at::get_num_threads() : 1),
      c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  if (strides.empty()) made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

std::vector<at::Tensor> fresh_statistics(const Entry& entry, const at::Tensor& beside) {
  std::vector<at::Tensor> statistics;
  for (int64_t i = 0; i < entry.statistics; i++) statistics.push_back(empty({entry.rows}, entry.compute, beside));
  return statistics;
}

variable_list run_forward(const Run& run, at::TensorList operands, const std::vector<at::Tensor>& statistics) {
  const auto& entry = *run.entry;
  std::vector<void*> pointers;
  pointers.reserve(MOST_OPERANDS);
  for (const auto& t : operands) pointers.push_back(const_cast<void*>(t.const_data_ptr()));
  for (const auto i : entry.written) pointers[i] = operands[i].mutable_data_ptr();  // of no memory that others have, too
  variable_list outputs;
  for (const auto& output : entry.outputs) {
    outputs.push_back(new_output(output, operands[0], run.kept, entry.has_formats));
    pointers.push_back(outputs.back().mutable_data_ptr());
  }
  for (const auto& t : statistics) pointers.push_back(t.mutable_data_ptr());
  const auto shared = entry.shared(pointers, operands[0], run.stream);
  for (const auto& launch : entry.forward) launch(pointers, run.stream, run.number);
  return outputs;
}

THPObjectPtr wrapped(at::ArrayRef<at::Tensor> tensors) {
  THPObjectPtr all(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!all) raise();
  for (size_t i = 0; i < tensors.size(); i++) {
    PyObject* tensor = THPVariable_Wrap(tensors[i]);
    if (tensor == nullptr) raise();
    PyTuple_SET_ITEM(all.get(), i, tensor);
  }
  return all;
}

/* What Python does: whatever was not seen before, and gradients that may be differentiated again. */
variable_list backward_by_python(
    const Entry& entry, const variable_list& saved, size_t count, const variable_list& grads,
    const std::vector<int64_t>& wanted, const Key& key) {
  const auto all = at::ArrayRef<at::Tensor>(saved);
  const auto kept = entry.saved.size();
  auto operands = wrapped(all.slice(0, kept)), statistics = wrapped(all.slice(kept)), given = wrapped(grads);
  THPObjectPtr indices(PyTuple_New(static_cast<Py_ssize_t>(wanted.size())));
  for (size_t i = 0; i < wanted.size(); i++) PyTuple_SET_ITEM(indices.get(), i, PyLong_FromLongLong(wanted[i]));
  THPObjectPtr handle(PyTuple_Pack(
      2, THPObjectPtr(PyLong_FromVoidPtr(const_cast<Entry*>(&entry))).get(),
      THPObjectPtr(PyBytes_FromStringAndSize(
          reinterpret_cast<const char*>(key.words.data()), static_cast<Py_ssize_t>(key.size * sizeof(int64_t)))).get()));
  THPObjectPtr found(PyObject_CallFunctionObjArgs(
      slow_backward, entry.repeat, operands.get(), statistics.get(), given.get(), indices.get(), handle.get(), nullptr));
  if (!found) raise();
  variable_list gradients(count);
  for (size_t i = 0; i < count; i++) {
    PyObject* gradient = PyTuple_GET_ITEM(found.get(), i);
    if (gradient != Py_None) gradients[i] = THPVariable_Unpack(gradient);
  }
  return gradients;
}

variable_list run_backward(
    const Entry& entry, const Backward& backward, const variable_list& saved, const at::Tensor& grad, size_t count,
    void* stream, size_t kept) {
  std::vector<void*> pointers;
  pointers.reserve(2 * MOST_OPERANDS);
  for (const auto& t : saved) pointers.push_back(const_cast<void*>(t.const_data_ptr()));
  pointers.push_back(const_cast<void*>(grad.const_data_ptr()));
  variable_list gradients(count);
  for (const auto i : backward.wanted) {
    auto& gradient = gradients[entry.saved[i]];
    gradient = entry.has_formats ? at::empty_like(saved[i])
                                 : new_output({saved[i].sizes().vec(), {}, saved[i].scalar_type()}, grad, kept, false);
    pointers.push_back(gradient.mutable_data_ptr());
  }
  const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.compute));
  auto bytes = Lender::padded(backward.shared.bytes());
  for (const auto size : backward.partials) bytes += Lender::padded(size * itemsize);
  Lender lender(bytes, grad, stream);
  const bool is_lent = lender.memory.defined();
  variable_list partials;
  for (const auto size : backward.partials) {
    partials.push_back(is_lent ? lender(size * itemsize) : empty({size}, entry.compute, grad));
    pointers.push_back(partials.back().mutable_data_ptr());
  }
  const auto shared = backward.shared(pointers, grad, stream, is_lent ? &lender : nullptr);
  for (const auto& launch : backward.launches) launch(pointers, stream, 0.0);
  return gradients;
}

struct Normalization : torch::autograd::Function<Normalization> {
  static variable_list forward(AutogradContext* context, const Run& run, at::TensorList operands) {
    const auto& entry = *run.entry;
    const auto statistics = fresh_statistics(entry, operands[0]);
    auto outputs = run_forward(run, operands, statistics);
    variable_list saved;
    for (const auto i : entry.saved) {
      const auto& tensor = i < 0 ? outputs[-1 - i] : operands[i];
      saved.push_back(tensor.is_inference() ? tensor.clone() : tensor);  // autograd refuses those of inference mode
    }
    saved.insert(saved.end(), statistics.begin(), statistics.begin() + entry.kept_statistics);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["entry"] = reinterpret_cast<int64_t>(run.entry);
    context->saved_data["operands"] = static_cast<int64_t>(operands.size());
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto& entry = *reinterpret_cast<Entry*>(context->saved_data["entry"].toInt());
    const auto count = static_cast<size_t>(context->saved_data["operands"].toInt());
    variable_list found(count);
    if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); })) {
      const auto saved = context->get_saved_variables();
      std::vector<int64_t> wanted;
      for (size_t i = 0; i < count; i++)
        if (context->needs_input_grad(i)) wanted.push_back(static_cast<int64_t>(i));
      found = gradients_of(entry, saved, count, grads, wanted);
    }
    found.insert(found.begin(), at::Tensor());  // `run` is no tensor
    return found;
  }

  static variable_list gradients_of(
      Entry& entry, const variable_list& saved, size_t count, const variable_list& grads,
      const std::vector<int64_t>& wanted) {
    pybind11::gil_scoped_acquire gil;
    Key key;
    const Backward* backward = nullptr;
    std::optional<void*> stream;
    if (entry.is_alone && !entry.is_refused && !c10::GradMode::is_enabled() && is_plain()) {
      int64_t mask = 0;
      for (const auto i : wanted) mask |= int64_t{1} << i;
      key.add(mask);
      if (grads[0].is_cpu()) key.add(at::get_num_threads());  // who have sums of their own
      bool is_dense = key.add(grads[0]);
      for (const auto& t : saved) is_dense = is_dense && key.add(t);  // which may come back with other strides, or freed
      if (!is_dense || key.is_full) key.size = 0;
      const auto place = key.size == 0 ? entry.backward.end() : entry.backward.find(key);
      if (place != entry.backward.end()) {
        const auto* found = &place->second;
        stream = stream_of(saved[0]);
        if (stream.has_value() && !(found->shared.is_mailbox() && is_capturing(*stream))) backward = found;
      }
    }
    if (backward != nullptr) {
      try {
        const auto kept = grads[0].is_cpu() ? kept_now() : 0;
        pybind11::gil_scoped_release no_gil;
        return run_backward(entry, *backward, saved, grads[0], count, *stream, kept);
      } catch (const Refused&) {
        entry.is_refused = true;
      }
    }
    return backward_by_python(entry, saved, count, grads, wanted, key);
  }
};

/* (kind, eps, shape, *operands) in words, and the operands. `kind` is whatever object stands for the rest. Instead of a shape
   there may be a number, which may be another each time. False if anything is not plain. */
bool read(PyObject* const* args, Py_ssize_t count, Key& key, variable_list& operands, double& number) {
  PyObject *eps = args[1], *shape = args[2];
  if (count > static_cast<Py_ssize_t>(MOST_OPERANDS)) return false;
  key.add(reinterpret_cast<int64_t>(args[0]));
  key.add(reinterpret_cast<int64_t>(settings_now()));  // which a `with` block may change
  key.add(c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA));  // it decides about dtypes
  if (eps == Py_None) {
    key.add(-1);
  } else if (PyFloat_CheckExact(eps)) {
    const double value = PyFloat_AS_DOUBLE(eps);
    int64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    key.add(bits);
  } else {
    return false;
  }
  if (PyTuple_Check(shape) || PyList_CheckExact(shape)) {
    const auto dims = PySequence_Fast_GET_SIZE(shape);
    key.add(dims);
    for (Py_ssize_t i = 0; i < dims; i++) {
      PyObject* size = PySequence_Fast_GET_ITEM(shape, i);
      if (!PyLong_CheckExact(size)) return false;
      key.add(PyLong_AsLongLong(size));
    }
  } else if (PyLong_CheckExact(shape)) {
    key.add(1);
    key.add(PyLong_AsLongLong(shape));
  } else if (PyFloat_CheckExact(shape)) {
    key.add(-1);
    number = PyFloat_AS_DOUBLE(shape);
  } else {
    return false;
  }
  if (PyErr_Occurred()) {  // a number of more than 64 bits
    PyErr_Clear();
    return false;
  }
  for (Py_ssize_t i = 3; i < count; i++) {
    if (args[i] == Py_None) {
      key.add(-1);  // which no tensor's word is
      continue;
    }
    if (!THPVariable_CheckExact(args[i]) && reinterpret_cast<PyObject*>(Py_TYPE(args[i])) != parameter_type) return false;
    const auto& tensor = THPVariable_Unpack(args[i]);
    if (!key.add(tensor)) return false;
    operands.push_back(tensor);
  }
  return !operands.empty() && !key.is_full;
}

/* Whether operands may be written while the others are read: they share no memory with these, and who has saved them learns
   of it. */
bool can_be_written(const std::vector<int64_t>& written, const variable_list& operands) {
  for (const auto i : written) {
    const auto& t = operands[i];
    if (t.is_inference() && !c10::InferenceMode::is_enabled()) return false;
    for (size_t k = 0; k < operands.size(); k++)
      if (static_cast<int64_t>(k) != i && operands[k].storage().data() == t.storage().data()) return false;
  }
  return true;
}

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Key key;
  variable_list operands;
  double number = 0.0;
  if (count < 4 || !is_plain() || !read(args, count, key, operands, number)) Py_RETURN_NONE;
  const auto found = entries().find(key);
  if (found == entries().end()) Py_RETURN_NONE;
  Run run{found->second.get(), nullptr, number};
  if (run.entry->operands != operands.size() || run.entry->is_refused) Py_RETURN_NONE;
  if (!can_be_written(run.entry->written, operands)) Py_RETURN_NONE;
  const auto stream = stream_of(operands[0]);
  if (!stream.has_value() || (run.entry->shared.is_mailbox() && is_capturing(*stream))) Py_RETURN_NONE;
  run.stream = *stream;
  run.kept = operands[0].is_cpu() ? kept_now() : 0;
  int64_t needed = 0;
  if (records_gradients())
    for (size_t i = 0; i < operands.size(); i++) needed |= static_cast<int64_t>(operands[i].requires_grad()) << i;
  const bool needs_grad = needed != 0;
  if (needs_grad && (run.entry->repeat == Py_None || (needed & ~run.entry->differentiable) != 0)) Py_RETURN_NONE;
  variable_list outputs;
  try {
    pybind11::gil_scoped_release no_gil;
    outputs = needs_grad ? Normalization::apply(run, at::TensorList(operands))
                         : run_forward(run, operands, run.entry->scratch.empty() ? fresh_statistics(*run.entry, operands[0])
                                                                                 : run.entry->scratch);
  } catch (const Refused&) {
    run.entry->is_refused = true;
    Py_RETURN_NONE;
  }
  for (const auto i : run.entry->written) operands[i].unsafeGetTensorImpl()->bump_version();
  return run.entry->is_tuple ? wrapped(outputs).release() : THPVariable_Wrap(outputs[0]);
  END_HANDLE_TH_ERRORS
}

/* Of (function, grid, grid, grid, threads, shared, is_chained, is_cooperative, params), or (function, pool, numbers, reals,
   parts, ratio, params). */
bool read_launch(PyObject* given, Launch& launch) {
  unsigned long long function, pool, numbers, reals;
  PyObject* params;
  if (PyTuple_Size(given) == 9) {
    int is_chained, is_cooperative;
    if (!PyArg_ParseTuple(given, "KIIIIIppO!", &function, &launch.grid[0], &launch.grid[1], &launch.grid[2], &launch.threads,
                          &launch.shared, &is_chained, &is_cooperative, &PyTuple_Type, &params))
      return false;
    launch.is_chained = is_chained != 0, launch.is_cooperative = is_cooperative != 0;
  } else {
    long long parts;
    if (!PyArg_ParseTuple(given, "KKKKLdO!", &function, &pool, &numbers, &reals, &parts, &launch.ratio, &PyTuple_Type,
                          &params))
      return false;
    launch.pool = reinterpret_cast<decltype(launch.pool)>(pool);
    launch.numbers = reinterpret_cast<const int64_t*>(numbers);
    launch.reals = reinterpret_cast<const double*>(reals);
    launch.eps = launch.ratio == 0.0 ? 0.0 : launch.reals[0];
    launch.most_parts = parts;
  }
  launch.function = reinterpret_cast<void*>(function);
  if (PyTuple_GET_SIZE(params) > static_cast<Py_ssize_t>(2 * MOST_WORDS)) {
    PyErr_SetString(PyExc_ValueError, "too many parameters");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++) {
    long long slot, value = 0;
    double base = 0.0, slope = 0.0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(params, i), "L|Ldd", &slot, &value, &base, &slope)) return false;
    launch.params.push_back({slot, value, base, slope});
  }
  return true;
}

bool read_launches(PyObject* given, std::vector<Launch>& launches) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
    launches.emplace_back();
    if (!read_launch(PyTuple_GET_ITEM(given, i), launches.back())) return false;
  }
  return true;
}

bool read_numbers(PyObject* given, std::vector<int64_t>& numbers) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, i)));
    if (PyErr_Occurred()) return false;
  }
  return !PyErr_Occurred();
}

/* (sizes, words' bytes, kind) */
bool read_shared(PyObject* given, Shared& shared) {
  PyObject* sizes;
  long long itemsize, kind;
  if (!PyArg_ParseTuple(given, "O!LL", &PyTuple_Type, &sizes, &itemsize, &kind)) return false;
  shared.dtype = itemsize == 8 ? at::kLong : at::kInt, shared.kind = kind;
  return read_numbers(sizes, shared.sizes);
}

/* ((kind, eps, shape, *operands), tensors like the outputs, whether a tuple of them is returned, scratch, how many
   statistics there are and are kept, of how many rows, whether they are doubles, launches, what these share, operands that
   they write, what is kept for backward, bits of the operands that it is for, whether gradients lie as these do, repeat, who
   owns what the launches point to, whether it is of a norm alone): whether the call is found from now on. */
PyObject* remember(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given, *outputs, *scratch, *launches, *shared, *written, *saved, *repeat, *owner;
  long long statistics, kept_statistics, rows, differentiable;
  int is_tuple, is_double, has_formats, is_alone;
  if (!PyArg_ParseTuple(args, "O!O!pO!LLLpO!O!O!O!LpOOp", &PyTuple_Type, &given, &PyTuple_Type, &outputs, &is_tuple,
                        &PyTuple_Type, &scratch, &statistics, &kept_statistics, &rows, &is_double, &PyTuple_Type, &launches,
                        &PyTuple_Type, &shared, &PyTuple_Type, &written, &PyTuple_Type, &saved, &differentiable,
                        &has_formats, &repeat, &owner, &is_alone))
    return nullptr;
  Key key;
  variable_list operands;
  double number = 0.0;
  auto entry = std::make_unique<Entry>();
  if (entries().size() >= MOST_ENTRIES || PyTuple_GET_SIZE(given) < 4 || !is_plain() ||
      !read(PySequence_Fast_ITEMS(given), PyTuple_GET_SIZE(given), key, operands, number))
    Py_RETURN_FALSE;
  if (entries().count(key) > 0) Py_RETURN_TRUE;
  if (!read_launches(launches, entry->forward) || !read_shared(shared, entry->shared)) return nullptr;
  if (!read_numbers(written, entry->written)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) {
    const auto& like = THPVariable_Unpack(PyTuple_GET_ITEM(outputs, i));
    const auto strides = like.is_contiguous() ? std::vector<int64_t>() : like.strides().vec();
    entry->outputs.push_back({like.sizes().vec(), strides, like.scalar_type()});
  }
  entry->is_tuple = is_tuple != 0, entry->has_formats = has_formats != 0;
  if (!read_numbers(saved, entry->saved)) return nullptr;
  entry->differentiable = differentiable;
  entry->is_alone = is_alone != 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scratch); i++)
    entry->scratch.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(scratch, i)));
  entry->statistics = statistics, entry->kept_statistics = kept_statistics, entry->rows = rows;
  entry->compute = is_double ? at::kDouble : at::kFloat;
  entry->repeat = Py_NewRef(repeat), entry->owner = Py_NewRef(owner);
  entry->operands = operands.size();
  Py_INCREF(PyTuple_GET_ITEM(given, 0)), Py_XINCREF(settings_now());  // whose addresses are in the key
  entries().emplace(key, std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

/* (handle, wanted, partials, launches, what these share, who owns what the launches point to): a backward of a call that is
   remembered; `handle` is what Python was given. */
PyObject* remember_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long address;
  Py_buffer words;
  PyObject *wanted, *partials, *launches, *shared, *owner;
  if (!PyArg_ParseTuple(args, "(Ky*)O!O!O!O!O", &address, &words, &PyTuple_Type, &wanted, &PyTuple_Type, &partials,
                        &PyTuple_Type, &launches, &PyTuple_Type, &shared, &owner))
    return nullptr;
  auto& entry = *reinterpret_cast<Entry*>(address);
  Key key;
  key.size = static_cast<size_t>(words.len) / sizeof(int64_t);
  std::memcpy(key.words.data(), words.buf, static_cast<size_t>(words.len));
  PyBuffer_Release(&words);
  if (key.size == 0 || entry.backward.size() >= MOST_ENTRIES) Py_RETURN_FALSE;
  Backward backward;
  if (!read_numbers(wanted, backward.wanted) || !read_numbers(partials, backward.partials)) return nullptr;
  if (!read_launches(launches, backward.launches) || !read_shared(shared, backward.shared)) return nullptr;
  if (entry.backward.emplace(key, std::move(backward)).second) Py_INCREF(owner);  // entries stay for good
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

/* (Parameter, the mode of a default device, names of the module of settings, the function that gives a raw stream or None,
   who owns the hooks of launches or None, and by Python: backward, a mailbox, a lender and its bytes) */
PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *parameter, *context, *names, *stream, *owner, *backward, *mailbox, *lender;
  long long bytes;
  if (!PyArg_ParseTuple(
          args, "OOO!OOOOOL", &parameter, &context, &PyDict_Type, &names, &stream, &owner, &backward, &mailbox, &lender,
          &bytes))
    return nullptr;
  parameter_type = Py_NewRef(parameter), device_context_type = Py_NewRef(context);
  settings_names = Py_NewRef(names), raw_stream = Py_NewRef(stream);
  slow_backward = Py_NewRef(backward), slow_mailbox = Py_NewRef(mailbox);
  slow_lender = Py_NewRef(lender), Lender::largest_loan = bytes;
  current_name = PyUnicode_InternFromString("_current");
  hooks = owner == Py_None ? nullptr : Py_NewRef(owner);
  Py_RETURN_NONE;
}

/* (bytes from which a result is large, the function that asks for huge pages): from now on they are looked after. */
PyObject* look_after(PyObject*, PyObject* args) {
  unsigned long long large, ask;
  if (!PyArg_ParseTuple(args, "KK", &large, &ask)) return nullptr;
  auto& keeper = Keeper::all();
  keeper.ask = reinterpret_cast<decltype(keeper.ask)>(ask);
  keeper.large = static_cast<size_t>(large);  // who sees it sees the function too
  Py_RETURN_NONE;
}

/* (tensor, bytes that may be kept, whether threads will write here and there): gives a new tensor, which nobody has seen or
   written yet, memory that was kept, if it is large. */
PyObject* reuse(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* given;
  unsigned long long most;
  int is_scattered;
  if (!PyArg_ParseTuple(args, "OKp", &given, &most, &is_scattered)) return nullptr;
  const auto& tensor = THPVariable_Unpack(given);
  const auto size = tensor.storage().nbytes();
  auto& keeper = Keeper::all();
  if (keeper.takes(size, static_cast<size_t>(most))) {
    pybind11::gil_scoped_release no_gil;  // pages take long
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
        keeper.storage(size, static_cast<size_t>(most), is_scattered ? at::get_num_threads() : 1));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

/* (tensor): whether its memory is such. */
PyObject* has(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(THPVariable_Unpack(given).storage().data_ptr().get_deleter() == &Keeper::take_back);
  END_HANDLE_TH_ERRORS
}

/* (most): lets go of what is kept beyond so many bytes; how many are left, unless another thread is here. */
PyObject* release(PyObject*, PyObject* args) {
  unsigned long long most;
  if (!PyArg_ParseTuple(args, "K", &most)) return nullptr;
  auto& keeper = Keeper::all();
  Keeper::Blocks gone;
  const std::unique_lock<std::mutex> guard(keeper.lock, std::try_to_lock);
  if (!guard.owns_lock()) Py_RETURN_NONE;
  keeper.leave(static_cast<size_t>(most), gone);
  return PyLong_FromSize_t(keeper.bytes);
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL,
     "(kind, eps, shape, *operands): the output of a call that was seen before, or None"},
    {"remember", remember, METH_VARARGS, "a call that was prepared"},
    {"remember_backward", remember_backward, METH_VARARGS, "the backward of one"},
    {"set_up", set_up, METH_VARARGS, "once, before anything else"},
    {"look_after", look_after, METH_VARARGS, "large results on a CPU, by their bytes"},
    {"reuse", reuse, METH_VARARGS, "memory that was kept, for a new tensor"},
    {"has", has, METH_O, "whether a tensor has memory that will be kept"},
    {"release", release, METH_VARARGS, "what is kept beyond so many bytes"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "warpnorm_launcher", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_warpnorm_launcher() { return PyModule_Create(&module); }
