"""The precision plugin: the dtypes in which layers and user code compute.

Masters stay in fp32 (fp64 in ``64-true``), and so does all that the optimizer and checkpoints see of them.

* ``*-mixed`` is torch's autocast. The plugin enters it around the step on the calling thread; the engine captures it
  with each layer call and enters it again wherever the layer runs.
* ``64-true`` converts the module, masters included, as Lightning's own plugin does.
* ``bf16-true`` and ``16-true`` show layers and user code what Lightning's own plugin shows them: weights, buffers and
  inputs in low precision, and torch's default dtype set to it during a step. The weights are working copies of the
  masters (`dtypes`).
* ``16-*`` scales losses, so that small gradients do not underflow, and skips steps whose gradients are not finite.
  `scaler` holds the scale. Its state is saved where Lightning's own plugin finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_roundpipe.config import PRECISION_ALIASES, PRECISIONS
from lightning_roundpipe.memory.dtypes import Formats, widen
from lightning_roundpipe.memory.loss_scale import Scales
from lightning_roundpipe.optim.clipping import Clip
from lightning_roundpipe.optim.scaling import LossScale

_OF_THE_FLAG = (Precision, MixedPrecision, HalfPrecision, DoublePrecision, TransformerEnginePrecision)
"""The plugins that Lightning creates for ``Trainer(precision=...)``. Any other plugin has hooks of its own."""

_KEY = MixedPrecision.__qualname__
"""The key of a checkpoint under which Lightning's own plugin saves its scaler."""

_SUPPORTED = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"


class RoundPipePrecision(Precision):
    """The Trainer's precision flag under ``RoundPipeStrategy``.

    Args:
        precision: Lightning's flag. The strategy creates this plugin for the Trainer's ``precision=`` by itself.
        scaler: the loss scale of fp16 precisions starts with its state. Default: torch's ``GradScaler``.

    Raises:
        ValueError: the precision is not supported, or a scaler is given for another precision than fp16.
    """

    def __init__(self, precision: str = "32-true", scaler: GradScaler | None = None) -> None:
        precision = PRECISION_ALIASES.get(str(precision), str(precision))
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not supported by the roundpipe strategy; use {_SUPPORTED}. For fp8 "
                "products, also convert the model's layers with torchao.float8.convert_to_float8_training."
            )
        self.precision: Any = precision
        self._half = HalfPrecision(precision) if precision in ("bf16-true", "16-true") else None  # type: ignore[arg-type]
        self._true: Precision | None = DoublePrecision() if precision == "64-true" else self._half
        """Lightning's own plugin, where it converts data."""
        self.low = self._half._desired_input_dtype if self._half else None
        """The dtype to which weights, buffers and inputs are converted; None: they are not."""
        self.scaler: GradScaler | None = None
        """The loss scale in fp16; None in other precisions."""
        if precision.startswith("16-"):
            self.scaler = GradScaler(device="cpu")  # the device of the gradients
            self.scaler.scale(torch.zeros(()))  # initialises its scale
            if scaler is not None and scaler.is_enabled():
                self.scaler.load_state_dict(scaler.state_dict())
        elif scaler is not None:
            raise ValueError(f"precision={precision!r} does not scale losses: leave out scaler=, or set 16-mixed.")
        self._scales = Scales()
        self.skipped = False
        """Whether the last optimizer step had no loss, so that there was no step to scale."""
        self.clipping: Callable[[Clip], None] | None = None
        """Receives the clipping to apply where gradients are not in ``.grad``. The strategy sets it."""
        self.after_backward: Callable[[], None] | None = None
        """Called after each backward, before hooks see gradients. The strategy sets it for several machines."""
        self.device = "cpu"
        """The type of the devices that layers run on. The strategy sets it."""

    @classmethod
    def of(cls, plugin: Precision | None) -> RoundPipePrecision:
        """Return the plugin for the precision of the one that Lightning created from the Trainer's flag.

        Raises:
            ValueError: the flag does not create such a plugin, and its hooks would be lost.
        """
        if isinstance(plugin, cls):
            return plugin
        if plugin is None:
            return cls()
        if type(plugin) not in _OF_THE_FLAG:
            raise ValueError(
                f"plugins=[{type(plugin).__name__}(...)] brings a precision plugin, and the roundpipe strategy has its "
                f"own: take it out and set precision= to {_SUPPORTED}."
            )
        return cls(str(plugin.precision), getattr(plugin, "scaler", None))

    def __getstate__(self) -> dict[str, Any]:
        """Drop what belongs to a run: waiting scales and the clipping callback. The scaler keeps the loss scale."""
        kept = {name: value for name, value in vars(self).items() if name != "_scales"}
        return kept | {"clipping": None, "after_backward": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._scales = Scales()

    # -- what is converted --------------------------------------------------------------------------------------------

    def formats(self) -> Formats:
        """Return the dtypes for the engine. Call it outside a step."""
        if self.scaler is not None:
            self._scales = Scales(LossScale(self.scaler), outer=self._half is None)
        return Formats(self.low, self.precision.endswith("-mixed"), self._true is not None, scales=self._scales)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert buffers as Lightning's own plugin does, and all that ``module.to`` reaches except parameters."""
        if self.low is None:
            return module if self._true is None else self._true.convert_module(module)
        modules = list(module.modules())
        parameters = [dict(inner._parameters) for inner in modules]
        try:
            for inner in modules:
                inner._parameters.clear()
            module.to(dtype=self.low)
        finally:
            for inner, own in zip(modules, parameters, strict=True):
                inner._parameters.update(own)
        module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # recurrent modules list their parameters
        return module

    def prepare(self, module: LightningModule, *, fitting: bool) -> LightningModule:
        """Convert the module. If ``fitting``, widen trained parameters whose dtype is too narrow for masters."""
        self.convert_module(module)
        for parameter in Formats(self.low).too_narrow(module.parameters()) if fitting else ():
            widen(parameter)
        return module

    def make_room(self, module: LightningModule, state: Mapping[str, Any]) -> None:
        """Widen what is narrower than ``state`` and will be as wide, before that is loaded into it without loss.

        In 64-true that is the whole module, which is converted later otherwise, as in plain training.
        """
        if self.precision == "64-true":
            self.convert_module(module)
        if self.low is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        for name, parameter in module.named_parameters():
            saved = state.get(name)
            if parameter.dtype is self.low and isinstance(saved, Tensor) and saved.dtype is torch.float32:
                widen(parameter)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._true.convert_input(data) if self._true else data

    @override
    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return self._true.tensor_init_context() if self._true else super().tensor_init_context()

    @override
    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.tensor_init_context()

    # -- the step -----------------------------------------------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._true:
                stack.enter_context(self._true.forward_context())
            if not self.precision.endswith("-mixed"):
                yield
                return
            dtype = torch.float16 if self.scaler is not None else torch.bfloat16
            # User code may compute on the host too, and must see the same dtypes there.
            for device in sorted({"cpu", self.device}):
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None and self._half is None:  # Lightning's own 16-true shows no scale
            scale = self._scales.last if module.automatic_optimization else self.scaler.get_scale()
            tensor = tensor * torch.tensor(scale, dtype=torch.float32, device=tensor.device)
        return super().pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward as the base class does. In 16-true, the engine scales the loss given to ``manual_backward``."""
        if self.scaler is None or self._half is None or model.automatic_optimization:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            if self.after_backward is not None:
                self.after_backward()
            return
        self._scales.manual = float(self.scaler.get_scale())
        try:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        finally:
            self._scales.manual = 1.0

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                f"precision={self.precision!r} skips steps whose gradients overflow, and LBFGS computes gradients "
                "within its step: use another optimizer, or a bf16 precision."
            )
        result = closure()
        apart = self.clipping is not None  # gradients are not in .grad, and the engine steps
        self.skipped = result is None and model.automatic_optimization
        if not (apart or self.skipped):
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if self.skipped:
            return result
        if apart:
            return optimizer.step(**kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.clipping is None:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            self.clipping(Clip(GradClipAlgorithmType(gradient_clip_algorithm).value, float(clip_val)))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[_KEY] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and (state := checkpoint.get(_KEY)):
            self.scaler.load_state_dict(state)
            self._scales.reload()
