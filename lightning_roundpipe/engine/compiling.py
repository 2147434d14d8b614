"""How a layer's forward runs: as written, or compiled by ``torch.compile``.

The replica on a worker is compiled. Its parameters are inputs of the compiled code, so it does not matter in which
arena they lie. Torch caches compiled code by function, so replicas of a layer on one device share it, and so do layers
of one class with parameters of the same shapes.

    class and shapes of a layer ── a function of its own on each device ── compiled once per kind of input ── [1]
    forward, backward ── compiled together; otherwise threads would compile the backward concurrently ── [2]
    while torch compiles ── it saves and restores generators: such calls keep the baton ── [3]
    sizes of inputs ── do not affect the code; otherwise it would depend on what ran before ── [4]
    more variants than torch caches ── an error; torch would run the layer as written from then on ── [5]

A compiled layer rounds otherwise than the layer as written, and otherwise again without grad. So all calls in training,
including the first batch's, are compiled and run with grad mode: forward, fused stage and recomputation are one code.

On [4]: by default torch compiles for the first sizes, then once more for all sizes. Both versions fit the first sizes,
and what ran before decides between them. Dynamic sizes from the start are not enough: two equal sizes become one
symbol, and code for unequal sizes fits equal ones too. So inputs with another pattern of equal sizes get another
function.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.engine.arguments import collect
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.model.replica import Replica

_TOGETHER = "force_non_lazy_backward_lowering"
"""AOTAutograd's setting for [2]."""
_OTHER_BACKEND = (
    ", or give it another backend: compile_layers={'backend': 'aot_eager'} needs no compiler for C++ or CUDA, which "
    "Ctrl-C or the command `timeout` end, too, if they come meanwhile"
)
_STRICT = {"fail_on_recompile_limit_hit": True, "suppress_errors": False}
"""Dynamo's settings for [5]."""


class LayerCompiler:
    """Runs layers as written."""

    compiled = False

    def of(self, layer: HostLayer, replica: Replica) -> Callable[..., Any]:
        """Return the callable for ``replica`` of ``layer``."""
        forward: Callable[..., Any] = replica.module.forward
        return forward


class CompiledForwards(LayerCompiler):
    """Compiles layers on their first call.

    Args:
        settings: arguments of ``torch.compile``.

    Raises:
        ValueError: if torch refuses the settings.
    """

    compiled = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from torch._dynamo import config as tracing  # takes a second to import
        from torch._dynamo import exc
        from torch._functorch import config

        if not hasattr(config, _TOGETHER):
            raise ValueError(
                f"compile_layers needs a newer torch than {torch.__version__}, which compiles a backward pass when it "
                "first runs, whatever other threads do. Leave compile_layers out, or upgrade torch."
            )
        if torch.version.cuda and not torch.cuda.is_available() and torch.__version__ < "2.13":
            raise ValueError(
                f"compile_layers: torch {torch.__version__} is built for CUDA, and here is no GPU. It would end the "
                "process, as its compiler may not be used in several threads then. Leave compile_layers out, install "
                "torch's CPU build, or upgrade torch."
            )
        self._settings = dict(settings)
        if self._settings.get("dynamic") is None:
            self._settings["dynamic"] = True  # [4]
        self._failures = exc.TorchDynamoException
        self._too_many = exc.FailOnRecompileLimitHit
        self._config: Any = config
        self._tracing: Any = tracing
        # Thread-local in newer torch, so workers patch it; process-wide in older torch, where compiled calls run alone.
        self._limits = {**_STRICT, "recompile_limit": self._tracing.recompile_limit}
        self._functions: dict[Any, Callable[..., Any]] = {}
        try:
            self._compile(_own_function("nothing"))
        except Exception as error:
            raise ValueError(
                f"compile_layers={dict(settings)!r} is refused by torch.compile: {error} Use what torch.compile takes."
            ) from error

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        settings: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in self._settings.items()}
        compiled: Callable[..., Any] = torch.compile(function, **settings)  # which takes some of the options out
        return compiled

    def of(self, layer: HostLayer, replica: Replica) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            function = self._function_of(replica, sizes_alike((args, kwargs)))
            try:
                with self._config.patch({_TOGETHER: True}), self._tracing.patch(self._limits):  # [2, 5]
                    return function(replica.module, args, kwargs)
            except self._too_many as error:
                raise RoundPipeError(
                    f"layer {layer.name!r} has more variants than torch compiles of one layer "
                    f"(torch._dynamo.config.recompile_limit={self._limits['recompile_limit']}), and would run as it is "
                    "written from now on, with other rounding. Have one code for all sizes (compile_layers={'dynamic': "
                    "True}, which is the default), raise that limit, or leave compile_layers out."
                ) from error
            except self._failures as error:
                other = "" if self._settings.get("backend") == "aot_eager" else _OTHER_BACKEND
                raise RoundPipeError(
                    f"layer {layer.name!r} could not be compiled ({type(error).__name__}, see above). Leave "
                    f"compile_layers out{other}."
                ) from error

        return forward

    def _function_of(self, replica: Replica, alike: tuple[int, ...]) -> Callable[..., Any]:
        """Return the function that all layers of this class and these parameter shapes share [1].

        Other layers would use up its limit of variants.
        """
        kind = type(replica.module)
        shapes = tuple((p.shape, p.dtype) for p in replica.originals[0].parameters())
        key = (kind, shapes, replica.device, torch.is_grad_enabled(), alike)
        if key not in self._functions:
            named = _own_function(f"{kind.__name__}_{len(self._functions)}")
            self._functions.setdefault(key, self._compile(named))
        return self._functions[key]


def sizes_alike(value: Any) -> tuple[int, ...]:
    """Return which sizes of the tensors in ``value`` torch identifies [4].

    Returns for each size of each tensor: the size itself if it is 0 or 1, else a number from 2 that equal sizes share.
    """
    seen: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    collect(value, set(), tensors)
    sizes = (size for tensor in tensors if not tensor.is_nested for size in tensor.shape)
    return tuple(size if size < 2 else seen.setdefault(size, len(seen) + 2) for size in sizes)


def _own_function(name: str) -> Callable[..., Any]:
    """Return a function that calls a module. Torch caches compiled code by the code object, including its name."""

    def run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.forward(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name)


def forwards_of(options: Options) -> LayerCompiler:
    """Return the compiler that ``compile_layers`` asks for."""
    settings = options.compile_layers
    return CompiledForwards(settings) if isinstance(settings, Mapping) else LayerCompiler()
