"""A device type of its own, ``played:0`` to ``played:3``: its tensors are torch's own, and lie in host memory.

``register()`` adds it to the process for good, so tests that use it run in a process of their own. What is like CUDA:

* Tensors are ``torch.Tensor`` with a storage of the device: views share it, and their version. They come from CPU
  tensors through DLPack, whose description of memory names a device. Operations that torch composes out of others,
  views among them, are torch's own; what is left computes on the CPU, on the same memory.
* Operations refuse to mix devices as CUDA's do: a host tensor without dimensions may be an operand, indices may be on
  the host, and everything else may not.
* Autograd runs backward on threads of its own, one for each device: torch asks ``played.cpp`` how many there are.
* Each device draws from a generator of its own.
* What would make the host wait for a GPU is noted with its stack: numbers that are read, results whose shape depends on
  numbers, and copies that are not between the device and pinned memory without blocking.

Everything is done at once, in the thread that asks for it, unless `late` is entered.
"""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "played"
_CPU, _EXTENSION = 1, 12
"""DLPack's numbers of the host and of a device type that is not its own."""


def register():
    """Add the device type to this process; doing it twice is harmless."""
    _register()


@functools.cache
def _register():
    built = library()
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, Module)
    built.played_register()
    aten = torch.library.Library("aten", "IMPL")
    for name in _VIEWS:
        kernel = functools.partial(getattr(torch.ops.aten, name).default.redispatch, _KEYS)
        aten.impl(name, kernel, "PrivateUse1")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in _missing():  # one by one, as torch does not find a fallback from within a TorchDispatchMode
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(_compute, op), "PrivateUse1")
    torch.empty(1, pin_memory=True)  # until torch has looked for a device, no memory is pinned
    return aten


def _missing():
    """Operations with a kernel for the CPU that torch does not compose for every device."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return [n.removeprefix("aten::") for n in names if has(n, "CPU") and not computed(n, "PrivateUse1")]


@functools.cache
def library():
    """``played.cpp``, built; it needs no more of torch's headers than takes a few seconds."""
    torch_home, folder = Path(torch.__file__).parent, tempfile.mkdtemp()
    built = Path(folder, "played.so")
    libraries = torch_home / "lib"
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch_home / 'include'}"]
    command += [str(Path(__file__).with_name("played.cpp")), "-o", str(built), f"-L{libraries}", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}"], check=True)
    library = ctypes.CDLL(str(built))
    library.played_pin.argtypes, library.played_unpin.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    library.played_stream.restype = ctypes.c_int64
    library.played_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    return library


# ----------------------------------------------------------------------------------------------------------- the module


LATE = []
"""The one that queues what is enqueued, if there is one; see `late`."""
MADE_CURRENT = {}
"""Devices that each thread has made current, be it by going back to it: on a GPU, CUDA takes memory for that."""


class Module:
    """``torch.played``: what torch asks of a device type in Python."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def device_count():
        return int(library().played_devices())

    @staticmethod
    def current_device():
        return int(library().played_device())

    @staticmethod
    def set_device(device):
        index = device if isinstance(device, int) else _index(torch.device(device))
        MADE_CURRENT.setdefault(threading.current_thread().name, set()).add(index)
        library().played_set_device(index)

    @staticmethod
    @contextlib.contextmanager
    def device(device):
        """The calling thread's current device, within."""
        before = Module.current_device()
        Module.set_device(device)
        try:
            yield
        finally:
            Module.set_device(before)

    @staticmethod
    def manual_seed_all(seed):
        for generator in generators():
            generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device=NAME):
        return generators()[_index(torch.device(device))].get_state()

    @staticmethod
    def set_rng_state(state, device=NAME):
        generators()[_index(torch.device(device))].set_state(state)

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]


@functools.cache
def generators():
    """Of each device, what its operations draw from."""
    return [torch.Generator() for _ in range(Module.device_count())]


def _index(device):
    return Module.current_device() if device.index is None else device.index


# ---------------------------------------------------------------------------------------------------------------- waits


@dataclass(frozen=True)
class Wait:
    """One time that the host would have waited for a GPU."""

    thread: str
    what: str
    stack: tuple[str, ...]
    """``file:line function``, the outermost first."""

    def __str__(self):
        return f"{self.what} on {self.thread}: " + " < ".join(reversed(self.stack))


_listeners = []


@contextlib.contextmanager
def listening(listener):
    """``listener`` is told of each wait within, in the thread that waits."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def waits():
    """Those that come within, of all threads."""
    found = []
    with listening(found.append):
        yield found


def _wait(what):
    if not _listeners:
        return
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    stack = tuple(f"{_short(f.filename)}:{f.lineno} {f.name}" for f in frames)
    for listener in list(_listeners):
        listener(Wait(threading.current_thread().name, what, stack))


def _short(filename):
    return (
        filename.rpartition("site-packages/")[2] if "site-packages" in filename else "/".join(filename.split("/")[-2:])
    )


class Cudart:
    """What ``torch.cuda.cudart()`` is asked for: to pin host memory."""

    registrations = 0

    def cudaHostRegister(self, address, nbytes, flags):
        library().played_pin(address, nbytes)
        self.registrations += 1
        return 0

    def cudaHostUnregister(self, address):
        library().played_unpin(address)
        return 0


CUDART = Cudart()


# ------------------------------------------------------------------------------------------------------------- tensors

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _elsewhere(tensor, kind, index):
    """``tensor`` as one of another device, of the same memory. It lives for as long."""
    capsule = to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
    # A DLTensor begins with a pointer, and then says which device that is of.
    where = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    where[0], where[1] = kind, index
    moved = from_dlpack(capsule)
    if moved.stride() != tensor.stride():  # of dimensions with one element, DLPack's own
        moved = torch.ops.aten.as_strided.default.redispatch(_KEYS, moved, tensor.size(), tensor.stride())
    return moved


def on_host(tensor):
    """The memory of a tensor of the device, as a host tensor."""
    return _elsewhere(tensor, _CPU, 0)


def on_device(tensor, index):
    """The memory of a host tensor, as a tensor of the device."""
    return _elsewhere(tensor, _EXTENSION, index)


def _is_ours(value):
    return isinstance(value, Tensor) and value.device.type == NAME


# ------------------------------------------------------------------------------------------------------------- kernels

_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex")
"""What makes a tensor of the same storage, and is not composed out of other operations."""
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
          "unique_consecutive", "bincount", "_linalg_eigh"}  # fmt: skip
"""Operations whose result is a number on the host, or has a shape that depends on numbers."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations whose indices may be on the host. They are brought to the device first, out of pageable memory."""


def _compute(op, *args, **kwargs):
    """Every operation that has no kernel and is not composed of others: on the CPU, in place of a GPU's."""
    name = op._schema.name.removeprefix("aten::")
    index = _common_index(op, name, args, kwargs)
    if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        _wait(name)
    elif _counts(name, args):
        _wait(f"{name} by a mask")
    if LATE:
        result = LATE[0].compute(op, name, args, kwargs, index)
        if result is not NotImplemented:
            return result
        LATE[0].drain(index)
    given = {key: _lowered(value) for key, value in kwargs.items()}
    if any(a.name == "generator" for a in op._schema.arguments):
        given["generator"] = kwargs.get("generator") or generators()[index]
    fits = {key: value for key, value in kwargs.items() if key.startswith("out") and _is_ours(value)}
    grown = [key for key, value in fits.items() if not value.numel()]
    try:
        fresh = {key: torch.empty(0, dtype=kwargs[key].dtype) for key in grown}  # as the memory of ours cannot grow
        result = op(*map(_lowered, args), **given | fresh)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        fresh = {key: torch.empty(0, dtype=value.dtype) for key, value in fits.items()}
        result = op(*map(_lowered, args), **given | fresh)
    for key, value in fresh.items():
        if kwargs[key].shape == value.shape:
            on_host(kwargs[key]).copy_(value)
        else:
            _give(kwargs[key], value)
    return _raised(op, result, args, kwargs, index)


def _counts(name, args):
    """Whether it takes elements that a mask names; to fill them with one number CUDA need not know how many."""
    if name not in _INDEXING or ("index_put" in name and args[2].numel() == 1):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _give(tensor, host):
    """Other memory, of another size, for a tensor of ours: that of ``host``."""
    memory = _put(host, tensor.device.index).untyped_storage()
    _SET.redispatch(_KEYS, tensor, memory, 0, host.size(), host.stride())


def _put(host, index):
    return LATE[0].placed(host, index) if LATE else on_device(host, index)


def _lowered(value):
    if isinstance(value, Tensor):
        return on_host(value) if value.device.type == NAME else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [_lowered(v) for v in value]
    return value


def _raised(op, result, args, kwargs, index):
    """What the operation returns: what it has written to, as it was given, and else new tensors of the device."""
    if result is None:
        return None
    returns, schema = op._schema.returns, op._schema
    values = [result] if len(returns) == 1 else result
    raised = []
    for value, returned in zip(values, returns, strict=True):
        if returned.alias_info is not None and returned.alias_info.is_write:
            raised.append(_written(schema, returned.alias_info.before_set, args, kwargs))
        elif isinstance(value, Tensor):
            raised.append(_put(value, index))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            raised.append([_put(v, index) for v in value])
        else:
            raised.append(value)
    return raised[0] if len(returns) == 1 else tuple(raised)


def _written(schema, names, args, kwargs):
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == names:
            return kwargs[argument.name] if argument.name in kwargs else args[position]
    raise AssertionError(f"{schema} writes to nothing that it is given")


def _common_index(op, name, args, kwargs):
    """Of the one device that all tensors are on.

    Raises:
        RuntimeError: they are not.
    """
    found = None
    host = None
    for position, argument in enumerate(op._schema.arguments):
        value = kwargs.get(argument.name) if position >= len(args) else args[position]
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            if tensor.device.type == NAME:
                if found is not None and tensor.device != found:
                    raise _mixed(op, found, tensor.device)
                found = tensor.device
            elif name in _INDEXING and argument.name == "indices":
                if tensor.dim():
                    _wait(f"{name} by indices on the host")
            elif tensor.dim() or (argument.alias_info is not None and argument.alias_info.is_write):
                host = tensor
    if found is None:
        return _index(torch.device(kwargs.get("device") or NAME))
    if host is not None:
        raise _mixed(op, found, host.device)
    assert found.index is not None
    return found.index


def _mixed(op, one, other):
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
        f"(when checking the arguments of {op})"
    )


def _copy(to, of, non_blocking=False):
    """``to.copy_(of)``. On a GPU only copies on it, and those from and to pinned memory, are not waited for."""
    hosts = [t for t in (to, of) if t.device.type != NAME]
    waits = any(not (non_blocking and t.is_pinned()) for t in hosts)
    if waits:
        _wait("copy to the host" if hosts[0] is to else "copy of pageable memory" if non_blocking else "blocking copy")
    if LATE:
        LATE[0].copy(to, of, waits)
    else:
        torch.ops.aten.copy_.default(_lowered(to), _lowered(of))
    return to


def _native_dropout(x, p, train):
    """The CPU's takes no generator."""
    if train is False or not p:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x).bernoulli_(1 - p)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask.bool()


def _resize(tensor, size, *, memory_format=None):
    host = torch.empty(0, dtype=tensor.dtype).resize_(size)
    if host.numel() * host.element_size() <= tensor.untyped_storage().nbytes():
        return torch.ops.aten.resize_.default.redispatch(_KEYS, tensor, size)
    if LATE:
        LATE[0].drain(tensor.device.index)
    known = on_host(tensor).reshape(-1)
    host.view(-1)[: known.numel()] = known
    _give(tensor, host)
    return tensor


def _set_whole_storage(tensor, storage):
    return _SET.redispatch(_KEYS, tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])


def _set_to(tensor, source):
    return _SET.redispatch(
        _KEYS, tensor, source.untyped_storage(), source.storage_offset(), source.size(), source.stride()
    )


def _convolution_backward(grad, x, weight, *args):
    biases = [weight.shape[1] * args[5] if args[3] else weight.shape[0]]
    return _compute(torch.ops.aten.convolution_backward.default, grad, x, weight, biases, *args)


def _histc(x, bins=100, min=0, max=0):
    """Of whole numbers too, unlike the CPU's."""
    if min == max:
        _wait("histc")
    if LATE:
        LATE[0].drain(x.device.index)
    return _put(torch.histc(on_host(x).float(), bins, min, max).to(x.dtype), x.device.index)


_KERNELS = {
    "copy_": _copy,
    "_copy_from": lambda of, to, non_blocking=False: _copy(to, of, non_blocking),
    "native_dropout": _native_dropout,
    "resize_": _resize,
    "set_.source_Storage_storage_offset": functools.partial(_SET.redispatch, _KEYS),
    "set_.source_Storage": _set_whole_storage,
    "set_.source_Tensor": _set_to,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # out of products and a softmax
    "convolution_overrideable": functools.partial(_compute, torch.ops.aten.convolution.default),
    "convolution_backward_overrideable": _convolution_backward,
    "histc": _histc,
}
