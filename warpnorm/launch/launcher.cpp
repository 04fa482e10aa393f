/* Calls that were seen before, without Python: a look-up by whatever decides about a call, its allocations and the launch,
   forward and backward. What is not found here, and what is not plain, is Python's (`repeat.py`), which tells `remember` of
   what it prepared. Nothing is ever forgotten: graphs and autograd's nodes may refer to it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
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

constexpr size_t MOST_WORDS = 128, MOST_OPERANDS = 16, MOST_ENTRIES = 16384;
constexpr int64_t VECTOR_BYTES = 16;

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
    const bool is_aligned = reinterpret_cast<uintptr_t>(address) % VECTOR_BYTES == 0;
    add(static_cast<int64_t>(sizes.size()) << 32 | static_cast<int64_t>(t.scalar_type()) << 24 |
        static_cast<int64_t>(t.get_device() + 1) << 1 | is_aligned);  // -1 is the CPU
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

/* One launch: of a kernel, or of native code by the threads of a pool. Its pointers are those of the tensors at hand. */
struct Launch {
  struct Param {
    int64_t slot;  // of a tensor; or negative, and the value
    int64_t value;
  };
  void* function = nullptr;
  std::vector<Param> params;
  unsigned grid[2] = {1, 1}, threads = 0, shared = 0;
  bool is_chained = false;

  int (*pool)(void*, void**, const int64_t*, const double*, int64_t) = nullptr;
  const int64_t* numbers = nullptr;
  const double* reals = nullptr;
  int64_t most_parts = 1;

  void operator()(const std::vector<void*>& pointers, void* stream) const {
    if (pool != nullptr) {
      std::vector<void*> given;
      for (const auto& param : params) given.push_back(pointers[param.slot]);
      const auto parts = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), most_parts));
      if (pool(function, given.data(), numbers, reals, parts) != 0)
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
      values[i] = param.slot < 0 ? param.value : reinterpret_cast<int64_t>(pointers[param.slot]);
      places[i] = &values[i];
    }
    CUlaunchAttribute attribute;
    std::memset(&attribute, 0, sizeof(attribute));
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config;
    std::memset(&config, 0, sizeof(config));
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = 1;
    config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared;
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = &attribute;
    config.numAttrs = is_chained ? 1 : 0;
    const auto status = launch(&config, static_cast<CUfunction>(function), places.data(), nullptr);
    TORCH_CHECK(status == CUDA_SUCCESS, "the launch of a kernel failed: CUDA error ", static_cast<int>(status));
#else
    TORCH_CHECK(false, "built without CUDA");
#endif
  }
};

struct Backward {
  std::vector<int64_t> wanted;                 // the operands whose gradients it writes
  std::vector<int64_t> partials;               // the sizes of what the first launch leaves for the second
  std::vector<Launch> launches;
};

struct Entry {
  struct Output {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  std::vector<Output> outputs;
  bool is_tuple = false;                       // what is returned
  std::vector<at::Tensor> scratch;             // where statistics go that nobody reads
  int64_t statistics = 0, rows = 0;
  at::ScalarType compute = at::kFloat;
  Launch forward;
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

PyObject *parameter_type, *device_context_type, *settings_names, *current_name, *raw_stream, *slow_backward;
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

at::Tensor empty(c10::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& beside) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(beside.device()));
}

struct Run {
  Entry* entry;
  void* stream;
};

variable_list run_forward(const Run& run, at::TensorList operands, const std::vector<at::Tensor>& statistics) {
  const auto& entry = *run.entry;
  std::vector<void*> pointers;
  pointers.reserve(MOST_OPERANDS);
  for (const auto& t : operands) pointers.push_back(const_cast<void*>(t.const_data_ptr()));
  variable_list outputs;
  for (const auto& output : entry.outputs) {
    outputs.push_back(empty(output.sizes, output.dtype, operands[0]));
    pointers.push_back(outputs.back().mutable_data_ptr());
  }
  for (const auto& t : statistics) pointers.push_back(t.mutable_data_ptr());
  entry.forward(pointers, run.stream);
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
    const Backward& backward, const variable_list& saved, const at::Tensor& grad, size_t count, at::ScalarType compute,
    void* stream) {
  std::vector<void*> pointers;
  pointers.reserve(2 * MOST_OPERANDS);
  for (const auto& t : saved) pointers.push_back(const_cast<void*>(t.const_data_ptr()));
  pointers.push_back(const_cast<void*>(grad.const_data_ptr()));
  variable_list gradients(count);
  for (const auto i : backward.wanted) {
    gradients[i] = empty(saved[i].sizes(), saved[i].scalar_type(), grad);
    pointers.push_back(gradients[i].mutable_data_ptr());
  }
  variable_list partials;
  for (const auto size : backward.partials) {
    partials.push_back(empty({size}, compute, grad));
    pointers.push_back(partials.back().mutable_data_ptr());
  }
  for (const auto& launch : backward.launches) launch(pointers, stream);
  return gradients;
}

struct Normalization : torch::autograd::Function<Normalization> {
  static variable_list forward(AutogradContext* context, const Run& run, at::TensorList operands) {
    const auto& entry = *run.entry;
    std::vector<at::Tensor> statistics;
    for (int64_t i = 0; i < entry.statistics; i++)
      statistics.push_back(empty({entry.rows}, entry.compute, operands[0]));
    auto outputs = run_forward(run, operands, statistics);
    variable_list saved;
    for (const auto i : entry.saved) saved.push_back(i < 0 ? outputs[-1 - i] : operands[i]);
    saved.insert(saved.end(), statistics.begin(), statistics.end());
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
    if (entry.is_alone && !c10::GradMode::is_enabled() && is_plain()) {
      int64_t mask = 0;
      for (const auto i : wanted) mask |= int64_t{1} << i;
      key.add(mask);
      bool is_dense = key.add(grads[0]);
      for (const auto& t : saved) is_dense = is_dense && key.add(t);  // which may come back with other strides, or freed
      if (!is_dense || key.is_full) key.size = 0;
      const auto place = key.size == 0 ? entry.backward.end() : entry.backward.find(key);
      if (place != entry.backward.end()) {
        const auto* found = &place->second;
        stream = stream_of(saved[0]);
        if (stream.has_value()) backward = found;
      }
    }
    if (backward == nullptr) return backward_by_python(entry, saved, count, grads, wanted, key);
    pybind11::gil_scoped_release no_gil;
    return run_backward(*backward, saved, grads[0], count, entry.compute, *stream);
  }
};

/* (kind, eps, shape, *operands) in words, and the operands. `kind` is whatever object stands for the rest. False if anything
   is not plain. */
bool read(PyObject* const* args, Py_ssize_t count, Key& key, variable_list& operands) {
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

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Key key;
  variable_list operands;
  if (count < 4 || !is_plain() || !read(args, count, key, operands)) Py_RETURN_NONE;
  const auto found = entries().find(key);
  if (found == entries().end()) Py_RETURN_NONE;
  Run run{found->second.get(), nullptr};
  if (run.entry->operands != operands.size()) Py_RETURN_NONE;
  const auto stream = stream_of(operands[0]);
  if (!stream.has_value()) Py_RETURN_NONE;
  run.stream = *stream;
  int64_t needed = 0;
  if (records_gradients())
    for (size_t i = 0; i < operands.size(); i++) needed |= static_cast<int64_t>(operands[i].requires_grad()) << i;
  const bool needs_grad = needed != 0;
  if (needs_grad && (run.entry->repeat == Py_None || (needed & ~run.entry->differentiable) != 0)) Py_RETURN_NONE;
  variable_list outputs;
  {
    pybind11::gil_scoped_release no_gil;
    outputs = needs_grad ? Normalization::apply(run, at::TensorList(operands))
                         : run_forward(run, operands, run.entry->scratch);
  }
  return run.entry->is_tuple ? wrapped(outputs).release() : THPVariable_Wrap(outputs[0]);
  END_HANDLE_TH_ERRORS
}

/* Of (function, grid, grid, threads, shared, is_chained, params), or (function, pool, numbers, reals, parts, params). */
bool read_launch(PyObject* given, Launch& launch) {
  unsigned long long function, pool, numbers, reals;
  PyObject* params;
  if (PyTuple_Size(given) == 7) {
    int is_chained;
    if (!PyArg_ParseTuple(given, "KIIIIpO!", &function, &launch.grid[0], &launch.grid[1], &launch.threads, &launch.shared,
                          &is_chained, &PyTuple_Type, &params))
      return false;
    launch.is_chained = is_chained != 0;
  } else {
    long long parts;
    if (!PyArg_ParseTuple(given, "KKKKLO!", &function, &pool, &numbers, &reals, &parts, &PyTuple_Type, &params))
      return false;
    launch.pool = reinterpret_cast<decltype(launch.pool)>(pool);
    launch.numbers = reinterpret_cast<const int64_t*>(numbers);
    launch.reals = reinterpret_cast<const double*>(reals);
    launch.most_parts = parts;
  }
  launch.function = reinterpret_cast<void*>(function);
  if (PyTuple_GET_SIZE(params) > static_cast<Py_ssize_t>(2 * MOST_WORDS)) {
    PyErr_SetString(PyExc_ValueError, "too many parameters");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++) {
    long long slot, value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(params, i), "LL", &slot, &value)) return false;
    launch.params.push_back({slot, value});
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

/* ((kind, eps, shape, *operands), tensors like the outputs, whether a tuple of them is returned, scratch, rows, launch, what
   is kept for backward, bits of the operands that it is for, repeat, who owns what the launch points to, whether it is of a
   norm alone): whether the call is found from now on. */
PyObject* remember(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given, *outputs, *scratch, *launch, *saved, *repeat, *owner;
  long long rows, differentiable;
  int is_tuple, is_alone;
  if (!PyArg_ParseTuple(args, "O!O!pO!LO!O!LOOp", &PyTuple_Type, &given, &PyTuple_Type, &outputs, &is_tuple, &PyTuple_Type,
                        &scratch, &rows, &PyTuple_Type, &launch, &PyTuple_Type, &saved, &differentiable, &repeat,
                        &owner, &is_alone))
    return nullptr;
  Key key;
  variable_list operands;
  auto entry = std::make_unique<Entry>();
  if (entries().size() >= MOST_ENTRIES || PyTuple_GET_SIZE(given) < 4 || !is_plain() ||
      !read(PySequence_Fast_ITEMS(given), PyTuple_GET_SIZE(given), key, operands))
    Py_RETURN_FALSE;
  if (entries().count(key) > 0) Py_RETURN_TRUE;
  if (!read_launch(launch, entry->forward)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) {
    const auto& like = THPVariable_Unpack(PyTuple_GET_ITEM(outputs, i));
    entry->outputs.push_back({like.sizes().vec(), like.scalar_type()});
  }
  entry->is_tuple = is_tuple != 0;
  if (!read_numbers(saved, entry->saved)) return nullptr;
  entry->differentiable = differentiable;
  entry->is_alone = is_alone != 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scratch); i++)
    entry->scratch.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(scratch, i)));
  entry->statistics = static_cast<int64_t>(entry->scratch.size());
  entry->rows = rows;
  if (!entry->scratch.empty()) entry->compute = entry->scratch[0].scalar_type();
  entry->repeat = Py_NewRef(repeat), entry->owner = Py_NewRef(owner);
  entry->operands = operands.size();
  Py_INCREF(PyTuple_GET_ITEM(given, 0)), Py_XINCREF(settings_now());  // whose addresses are in the key
  entries().emplace(key, std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

/* (handle, wanted, partials, launches): a backward of a call that is remembered; `handle` is what Python was given. */
PyObject* remember_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long address;
  Py_buffer words;
  PyObject *wanted, *partials, *launches;
  if (!PyArg_ParseTuple(args, "(Ky*)O!O!O!", &address, &words, &PyTuple_Type, &wanted, &PyTuple_Type, &partials,
                        &PyTuple_Type, &launches))
    return nullptr;
  auto& entry = *reinterpret_cast<Entry*>(address);
  Key key;
  key.size = static_cast<size_t>(words.len) / sizeof(int64_t);
  std::memcpy(key.words.data(), words.buf, static_cast<size_t>(words.len));
  PyBuffer_Release(&words);
  if (key.size == 0 || entry.backward.size() >= MOST_ENTRIES) Py_RETURN_FALSE;
  Backward backward;
  if (!read_numbers(wanted, backward.wanted) || !read_numbers(partials, backward.partials)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); i++) {
    backward.launches.emplace_back();
    if (!read_launch(PyTuple_GET_ITEM(launches, i), backward.launches.back())) return nullptr;
  }
  entry.backward.emplace(key, std::move(backward));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

/* (Parameter, the mode of a default device, names of the module of settings, the function that gives a raw stream or None,
   who owns the hooks of launches or None, backward by Python) */
PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *parameter, *context, *names, *stream, *owner, *backward;
  if (!PyArg_ParseTuple(args, "OOO!OOO", &parameter, &context, &PyDict_Type, &names, &stream, &owner, &backward))
    return nullptr;
  parameter_type = Py_NewRef(parameter), device_context_type = Py_NewRef(context);
  settings_names = Py_NewRef(names), raw_stream = Py_NewRef(stream);
  slow_backward = Py_NewRef(backward), current_name = PyUnicode_InternFromString("_current");
  hooks = owner == Py_None ? nullptr : Py_NewRef(owner);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL,
     "(kind, eps, shape, *operands): the output of a call that was seen before, or None"},
    {"remember", remember, METH_VARARGS, "a call that was prepared"},
    {"remember_backward", remember_backward, METH_VARARGS, "the backward of one"},
    {"set_up", set_up, METH_VARARGS, "once, before anything else"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "warpnorm_launcher", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_warpnorm_launcher() { return PyModule_Create(&module); }
