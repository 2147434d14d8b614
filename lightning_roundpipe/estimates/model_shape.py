"""The model of a request: on the meta device, with estimates for a machine."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import REDUCE_DTYPES
from lightning_roundpipe.estimates.costs_of_shapes import GRADIENT_BYTES, estimate_costs, layer_bytes
from lightning_roundpipe.estimates.hardware import AUTO
from lightning_roundpipe.estimates.models import make_model, packed_weights, read_config, with_adapters
from lightning_roundpipe.estimates.request import PlanRequest, Tiles
from lightning_roundpipe.estimates.tiles import tiled
from lightning_roundpipe.model.layers import find_layers
from lightning_roundpipe.model.lean_loss import lean_logits, make_lean
from lightning_roundpipe.model.refine import Refined, Size, arenas_of, cut_to_fit
from lightning_roundpipe.model.token_tiles import modules_in_tiles, tile_shapes
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import BESIDE, MASTER_BYTES, Parameters, process_bytes
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import Rules, Staleness
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.updates import adamw_bytes

USUAL_LENGTH = 2048
"""Tokens of a sequence without ``sequence_length``, if the model has that many positions."""

_MOST_LENGTH = 2**20
"""Positions of a model whose configuration has no limit."""

TILE = 4096
"""Tokens of a tile in estimates with tiles, if the request asks for no tiles."""
USUAL_TILE = 1024
"""Tokens of a tile that is proposed: products of so many take many times as long as reading the weights."""


class ModelShape:
    """A model on the meta device, with estimates for a machine. Layers are cut to fit into ``memory`` bytes of each
    worker.

    Raises:
        ValueError: model, adapters and packed weights do not fit each other, or ``max_positions`` asks for no more.
    """

    def __init__(self, request: PlanRequest, hardware: Hardware, memory: int | None = None) -> None:
        model = request.model
        config, self.quantization = read_config(model, request.model_settings)
        if self.quantization is not None and request.lora == "none":
            raise ValueError(
                f"model.quantization={self.quantization.form}: weights in few bits are not trained themselves, and "
                f"lora=none has no adapters. Choose some, as lora=all_linear, or train model={model} in full with "
                "model.quantization=null."
            )
        self._request, self.hardware = request, hardware
        if request.precision == "fp8":
            _refuse_without_fp8(request, hardware)
        self.configured = getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST_LENGTH
        self.longest = request.max_positions or self.configured
        if request.max_positions is not None:
            if self.longest <= self.configured:
                raise ValueError(
                    f"max_positions={self.longest} is no more than the {self.configured} tokens that model={model} has "
                    "positions for: leave it out."
                )
            config.get_text_config().max_position_embeddings = self.longest
        base, quantization = make_model(config, model, request.precision), self.quantization
        self._packed = {} if quantization is None else packed_weights(base, quantization)
        form = None if quantization is None else quantization.form
        self._module = with_adapters(base, model, request.lora, request.lora_settings, form)
        self._root = root = nn.Module()
        root.model = self._module  # as in a LightningModule, so that layers have the same names as in training
        found = find_layers(root)
        self.refined = Refined(found)
        if memory is not None:

            def size(layer: nn.Module) -> Size:
                return Size(*layer_bytes(layer, self._packed))

            refined = cut_to_fit(found, size, memory // BESIDE)
            sizes = {name: size(layer) for name, layer in refined.layers.items()}
            fits = refined.stuck is None or arenas_of(sizes) <= memory  # as training does, in the smallest arena
            self.refined = replace(refined, stuck=None) if fits else refined
        self._layers = self.refined.layers if self.refined.stuck is None else found
        nbytes = GRADIENT_BYTES if request.reduce_dtype is None else REDUCE_DTYPES[request.reduce_dtype]
        self._reduced_bytes = nbytes if nbytes < GRADIENT_BYTES else None
        self.has_experts = any(weight.ndim == 3 for weight in self._module.parameters())
        self._lean = _is_lean(self._module)
        self._tiled: list[tuple[nn.Module, int]] = []
        self._known: dict[tuple[int, int], Costs] = {}

    def costs(self, microbatch_size: int, sequence_length: int) -> Costs:
        """Return the costs of a microbatch of so many sequences, of so many tokens each. They are cached."""
        key = microbatch_size, sequence_length
        if key not in self._known:
            self._known[key] = self._costs(microbatch_size, sequence_length)
        return self._known[key]

    @property
    def parameters(self) -> Parameters:
        request, machine, weights = self._request, self.hardware, list(self._module.parameters())
        trained = sum(p.numel() for p in weights if p.requires_grad)
        frozen = sum(p.numel() for p in weights) - trained
        return Parameters(
            trained, frozen, weights[0].element_size(), bool(request.staleness), sum(p.numel() for p in self._packed),
            sum(one.nbytes for one in self._packed.values()), self.quantization.words if self.quantization else "",
            any(weight.dim() == 3 for weight in self._packed), request.machines, request.optimizer_state,
            shares=request.precision.startswith(("bf16", "fp8")) and not request.staleness and request.machines == 1,
            by_layer=not request.updates_at_once,
            process=process_bytes(0 if machine.emulated else machine.workers),
        )  # fmt: skip

    def under(self, request: PlanRequest) -> ModelShape:
        """Return the model under a request that differs in what costs do not depend on: machines and staleness."""
        other = copy(self)
        other._request = request
        return other

    def on(self, machine: Hardware) -> ModelShape:
        """Return the model with estimates for another machine, of the same kinds of devices in the same proportions."""
        other = copy(self)
        other.hardware = machine
        if machine.kinds:
            other._known = {}
        return other

    def in_tiles(self, tiles: Tiles = TILE) -> ModelShape:
        """Return the model with modules in tiles of tokens. Raises ``ValueError`` for names of no modules."""
        other = copy(self)
        found = modules_in_tiles(self._root, tiles if isinstance(tiles, int) else dict(tiles))
        other._known, other._tiled = {}, list(found.values())
        return other

    def _costs(self, microbatch_size: int, sequence_length: int) -> Costs:
        machine = self.hardware
        kinds = machine.kinds or (machine,)
        each = [self._costs_on(kind, microbatch_size, sequence_length) for kind in kinds]
        return Costs.of_workers([each[kinds.index(device)] for device in machine.devices]) if machine.kinds else each[0]

    def _costs_on(self, device: Hardware, microbatch_size: int, sequence_length: int) -> Costs:
        """Return the costs on devices of one kind."""
        tokens = torch.zeros(microbatch_size, sequence_length, dtype=torch.long, device="meta")
        without_logits = lean_logits(self._module) if self._lean else nullcontext()
        with without_logits, tiled(self._tiled, tile_shapes):
            calls = self._estimate(device, input_ids=tokens, labels=tokens)
        if (nbytes := self._reduced_bytes) is None:
            return Costs(calls)
        return Costs(calls).map(lambda c: replace(c, reduced_bytes=c.gradient_bytes * nbytes // GRADIENT_BYTES))

    def _estimate(self, device: Hardware, **batch: Tensor) -> tuple[CallCost, ...]:
        return estimate_costs(
            self._module, self._layers, batch, device, packed=self._packed, fp8=self._request.precision == "fp8"
        ).calls

    def rules(self, staleness: Staleness, network: float | None = None) -> Rules:
        """Return the times of the host, of copies, of updates and of the network, if there is one (bytes a second)."""
        machine = self.hardware
        between = None
        if network is not None:
            share = MASTER_BYTES / GRADIENT_BYTES  # fp32 weights are sent to all machines
            between = Network(self.parameters.machines, network * machine.network_efficiency, share)
        clips, working = self._request.gradient_clip_val is not None, self.parameters.working_bytes
        traffic = adamw_bytes(self.parameters.optimizer_state, working, self._reduced_bytes, scales=clips)
        at_once = self._request.updates_at_once
        return machine.rules(staleness, traffic, at_once=at_once, network=between)


def _refuse_without_fp8(request: PlanRequest, hardware: Hardware) -> None:
    """Refuse ``precision=fp8`` for devices without such products, with adapters, and with carried products."""
    if request.hardware == AUTO:
        raise ValueError(
            "precision=fp8: hardware=auto does not measure fp8 products. Add their rate to the file that it writes "
            "(flops.fp8), and plan with hardware=FILE."
        )
    if lacking := [kind.kind for kind in hardware.kinds or (hardware,) if "fp8" not in kind.flops]:
        raise ValueError(
            f"precision=fp8: {' and '.join(lacking)} has no rate of fp8 products (flops.fp8). GPUs before Ada and "
            "Hopper cannot multiply in fp8: plan with precision=bf16-mixed. For other GPUs, add the rate to a file: "
            "hardware=FILE."
        )
    if request.lora != "none":
        raise ValueError(
            f"precision=fp8 with lora={request.lora}: torchao.float8 also computes gradients of frozen weights, which "
            "takes longer than bf16. Leave one of them out."
        )
    if request.carry_products:
        raise ValueError(
            "precision=fp8 with carry_products=true: fp8 layers count as compiled, and nothing of these is carried. "
            "Leave one of them out."
        )


def _is_lean(module: nn.Module) -> bool:
    """Return whether the packaged module computes the loss without holding all logits."""
    try:
        make_lean(module)
    except ValueError:
        return False
    return True
