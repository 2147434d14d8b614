"""The torch function mode of the user's code between layer calls, one per microbatch.

Every torch function that user code calls passes through `UserCodeMode`, which does four things:

* It replaces masters that user code reads (a bare ``nn.Parameter``, ``F.linear(h, embed.weight)``) by stand-ins of this
  microbatch. Microbatches then do not accumulate into one ``.grad`` in the order in which threads happen to run, and
  user code sees masters in the dtype of the computation.
* It moves host tensors (labels, masks, parameters) to the device of the tensors that they meet, through page-locked
  memory, because other copies would block the host until the device is ready.
* Where user code reads values of a device, the host waits, and other microbatches run their user code meanwhile.
* With ``loss_weight="targets"`` it counts the targets of mean cross entropies.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_roundpipe.batches.weights import TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.module_buffers import HostBuffers
from lightning_roundpipe.user_code.graph_cut import forget_version, hook_gradient, keep_gradient, refuse_across
from lightning_roundpipe.user_code.host_to_device import HostToDeviceCopier
from lightning_roundpipe.user_code.module_state import about_to_write, about_to_write_in_place
from lightning_roundpipe.user_code.stand_ins import Copies, Proxies, is_stand_in
from lightning_roundpipe.user_code.torch_functions import IN_PLACE, WatchedTensors, waits

DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SETS_TRAINED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
"""Attribute getters that are differentiable."""
_VALUES = {DATA, *VIEWS}
"""Attribute getters whose result shares the tensor's memory."""
DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
ACCESSORS = frozenset({"__get__", "__set__", "__delete__", "requires_grad_"})
"""Functions that read or set an attribute of a tensor."""


_MIX_DEVICES = frozenset({"to", "copy_", "set_", "_pack_padded_sequence", "tensor_split"})
"""Functions that move a tensor themselves, or take lengths or positions on the host beside data on a device."""


class UserCodeMode(TorchFunctionMode):
    """The torch function mode of one microbatch's user code.

    Args:
        masters: ids of all the user's parameters.
        read: returns the values of a trained master, after waiting for its last update.
        train: whether to replace masters; evaluation only follows devices and dtypes.
        accelerator: the type of the ``devices``, to which host tensors move; None if these are the host.
        run_unlocked: runs a wait for a device while other microbatches may run user code.
        buffers: the layers' buffers; pending values are settled before user code reads a buffer.
        targets: counts the targets of mean cross entropies; None if nobody asks.
        copies: copies of masters that all microbatches of the step share; see `Proxies`.

    Attributes:
        returning: whether a backward runs; what it computes is not a loss.
        met_others: whether user code has computed with a trained ``nn.Parameter`` that is no master.
        met_buffer: a buffer of a layer that user code has read or written after calls of the step had changed it.
    """

    def __init__(
        self,
        masters: Container[int],
        read: Callable[[nn.Parameter], Tensor],
        formats: Formats | None = None,
        *,
        train: bool,
        accelerator: str | None,
        devices: Sequence[Device] = (),
        run_unlocked: Callable[[Callable[[], Any]], Any] = lambda wait: wait(),
        buffers: HostBuffers | None = None,
        targets: TargetCounts | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__()
        leave_untraced(type(self).__torch_function__)
        self._counts_targets = targets is not None
        self.targets = targets or TargetCounts()
        self.targets.read = functools.partial(number_of, run_unlocked=run_unlocked)
        self.proxies = Proxies(read, copies)
        self._read = read
        self.returning = self.met_others = False
        self.met_buffer = ""
        self._data = WatchedTensors[nn.Parameter]()
        """Each ``.data`` of a master that was read, by the master."""
        self._masters = masters
        self._train = train
        self._accelerator = accelerator
        self._formats = formats or Formats()
        self._replaces = train or self._formats.low is not None or bool(self._formats.hidden)
        self._run_unlocked = run_unlocked
        self._buffers = HostBuffers() if buffers is None else buffers
        self._bringer = HostToDeviceCopier(accelerator, devices)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._buffers and (func in _VALUES or name not in ACCESSORS):
            self._settle_buffers((args, kwargs))
        if name in ACCESSORS:
            if name == "__get__" and self._is_master(args[0]):
                if func == DTYPE:  # compared with ==, as each access makes a new getter
                    return self._formats.of(args[0])
                if func == DATA:
                    if not self._formats.differ(args[0]):
                        return self._watched(args[0], func(self._read(args[0]), *args[1:]))
                    self.refuse_write("reads .data of", args[0])  # it may write there and mean the master
                elif func in VIEWS:
                    return func(self.stand_in(args[0]), *args[1:])
            if func in _SETS_TRAINED and isinstance(args[0], nn.Parameter):
                about_to_write(args[0], "requires_grad")
            result = func(*args, **kwargs)
            if func == DATA and self._train:
                if id(args[0]) in self._masters:
                    return self._watched(args[0], result)
                forget_version(args[0])
            return result
        written = _written_by(name, args, kwargs)
        if written is not None:
            written = written if written._base is None else written._base
            if about_to_write_in_place(written):
                self._buffers.overwrite(written)
        if self._train and name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
            return self._hooked(func, args, kwargs)
        if self._replaces:
            first: Any = args[0] if args else None  # its copy cannot be written to in a master's place
            if self._is_master(first) and self._formats.differ_now(first) and IN_PLACE.fullmatch(name):
                self.refuse_write("writes to", args[0])
            else:
                args, kwargs = self._with_proxies(args, kwargs)
        if self._train:
            if func is torch.autograd.grad:
                named = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
                refuse_across(named["outputs"], named["inputs"], self.proxies.masters_of(named["inputs"]))
            if func is Tensor.backward and kwargs.get("inputs") is not None:
                refuse_across(args[0], kwargs["inputs"], self.proxies.masters_of(kwargs["inputs"]))
            result = self._call(func, name, args, kwargs)
            if self._counts_targets and not self.returning:
                self.targets.note(func, args, kwargs, result)
            return result
        return self._call(func, name, args, kwargs)

    def _backward(
        self, tensors: Sequence[Any], grad_tensors: Any, retain_graph: bool | None, create_graph: bool, inputs: Any
    ) -> None:
        """Run ``torch.autograd.backward``, for which torch leaves the mode, and user code in it under it."""
        grad_list = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(tensors)
        grads = torch.autograd._make_grads(tensors, grad_list, is_grads_batched=False)
        retain = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                tensors, grads, retain, create_graph, inputs or (), allow_unreachable=True, accumulate_grad=True
            )

    def _watched(self, master: nn.Parameter, data: Tensor) -> Tensor:
        """Watch the ``data`` of ``master``, which has a version counter of its own, and return it."""
        self._data.add(master, data)
        return data

    def written_by_data(self) -> list[nn.Parameter]:
        """Return the masters that were written to through their ``.data`` since the last call."""
        if written := self._data.written():
            self._data.forget_writes()
        return written

    def _settle_buffers(self, value: Any) -> None:
        found = (self._buffers.awaits(leaf) for leaf in tree_iter(value) if isinstance(leaf, Tensor))
        if buffer := next(filter(None, found), ""):
            self.met_buffer = buffer
            self._run_unlocked(self._buffers.settle)

    def _call(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._accelerator is not None:
            if (brought := self._bringer.answer(name, args, kwargs)) is not None:
                return brought
            args, kwargs = self._on_one_device(name, args, kwargs)
            if waits(name, args, kwargs, self._accelerator):
                return self._run_unlocked(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def given_to_function(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for a `torch.autograd.Function`, whose ``apply`` is not a torch function."""
        if self._replaces:
            args, _ = self._with_proxies(args, {})
        return args if self._accelerator is None else self._on_one_device("apply", args, {})[0]

    def refuse_write(self, does: str, master: nn.Parameter) -> None:
        """Raise an error in training: user code ``does`` something to a master of which it sees a copy."""
        if self._train:
            raise RoundPipeError(
                f"training_step {does} a parameter of shape {tuple(master.shape)}, of which it sees a low-precision "
                "copy: what is written there would be lost. Read it with .detach(), and write to parameters between "
                "steps, for example in on_train_batch_start."
            )

    def _with_proxies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace masters among the arguments and in lists one level deep; torch functions take them nowhere else."""
        if any(isinstance(a, (nn.Parameter, list, tuple)) for a in args):
            args = tuple(self._proxied(a) for a in args)
        if any(isinstance(v, (nn.Parameter, list, tuple)) for v in kwargs.values()):
            kwargs = {k: self._proxied(v) for k, v in kwargs.items()}
        return args, kwargs

    def stand_in(self, value: Any) -> Any:
        """Return the stand-in if ``value`` is a trained master or one seen in another dtype, else ``value``."""
        if not self._is_master(value):
            return value
        return self.proxies.of(value) if self._train else self._read(value)

    def _is_master(self, value: Any) -> bool:
        if type(value) is Tensor or not isinstance(value, nn.Parameter):
            return False
        if id(value) not in self._masters:
            self.met_others |= value.requires_grad
            return False
        return (self._train and value.requires_grad) or self._formats.differ_now(value)

    def _is_frozen(self, value: Tensor) -> bool:
        """Whether ``value`` is a frozen master or its stand-in, and user code has not read its ``.data``."""
        known = is_stand_in(value) or id(value) in self._masters
        return known and not value.requires_grad and not any(value is master for master in self._data)

    def _proxied(self, value: Any) -> Any:
        if type(value) in (list, tuple) and any(isinstance(v, nn.Parameter) for v in value):
            return type(value)(map(self.stand_in, value))
        return self.stand_in(value)

    def _hooked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if isinstance(tensor, nn.Parameter):
            raise RoundPipeError(
                f"{getattr(func, '__name__', '')} was called on a parameter within training_step, once for each "
                "microbatch. Do it between batches, for example in on_fit_start or on_train_batch_start."
            )
        if not tensor.requires_grad or func is Tensor.register_post_accumulate_grad_hook:
            return func(*args, **kwargs)
        if func is Tensor.register_hook:
            return hook_gradient(tensor, *args[1:], **kwargs)
        keep_gradient(tensor)
        return None

    def _on_one_device(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move operands to one device: that of the tensor that ``name`` writes to, else that of the device operands.

        A module's buffers and a metric's state stay on the host here, so an update of such a tensor brings its operands
        there and waits for them.
        """
        if name in _MIX_DEVICES:
            return args, kwargs
        there: list[torch.device] = []
        host = 0
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor):
                if (home := leaf.device).type == self._accelerator:
                    there.append(home)
                elif leaf.dim():
                    host += 1
        if not there:
            return args, kwargs
        target = _written_by(name, args, kwargs)
        where = there[0] if target is None else target.device
        several = any(home != where for home in there)
        if not (host or several):
            return args, kwargs
        if target is None and several:  # the one that the microbatch is on now, so that its tensor need not move
            now = torch.device(where.type, torch.accelerator.current_device_index())
            where = now if now in there else there[-1]

        def follow(tensor: Tensor) -> Tensor:
            home = tensor.device
            if home == where or (home.type != self._accelerator and not tensor.dim()):
                return tensor
            if tensor.is_leaf and tensor.requires_grad and home.type != self._accelerator:
                return self.proxies.on(tensor, where)
            if self._train and home.type != self._accelerator and self._is_frozen(tensor):
                return self.proxies.values_on(tensor, where, lambda value: self._bringer.bring(value, where))
            run_unlocked = self._run_unlocked if where.type != self._accelerator else (lambda bring: bring())
            moved: Tensor = run_unlocked(lambda: self._bringer.bring(tensor, where))
            return moved

        out = kwargs.get("out")
        first = 1 if target is not None and out is None else 0
        moved = (*args[:first], *(tree_map_only(Tensor, follow, a) for a in args[first:]))
        return moved, {k: v if v is out else tree_map_only(Tensor, follow, v) for k, v in kwargs.items()}


def leave_untraced(function: Callable[..., Any]) -> None:
    """Let torch's compiler neither trace ``function`` nor compile what it calls, if the compiler is imported.

    A function that user code has compiled would be compiled together with the mode, once for each operation, until the
    compiler gives up with warnings. Its operations run one by one instead.
    """
    if "torch._dynamo" in sys.modules:
        _leave_untraced(function)


@functools.cache
def _leave_untraced(function: Any) -> None:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # What `torch.compiler.disable` does, without its wrapper, which each operation would call.
    function._torchdynamo_disable = True
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


def number_of(count: Tensor, *, run_unlocked: Callable[[Callable[[], Any]], Any]) -> float:
    """Return ``count``, for which the host may have to wait: on a GPU, by way of ``run_unlocked``."""
    if count.device.type == "cpu":
        return float(count)
    return float(run_unlocked(lambda: float(count)))


def _written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that the torch function ``name`` writes to, or the first of several."""
    written = kwargs.get("out")
    if written is None and args and (IN_PLACE.fullmatch(name) or (name.startswith("_foreach") and name.endswith("_"))):
        written = args[0]
    return next((leaf for leaf in tree_iter(written) if isinstance(leaf, Tensor)), None)
