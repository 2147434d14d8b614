"""What a layer chooses in its forward it chooses when it is recomputed, whatever its numbers are then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_close_overall, assert_same, ours, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lightning_roundpipe.runtime.core import layer_executor
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.layer_calls.discrete_ops import DiscreteOpRecorder, DiscreteOpReplayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor

CPU = torch.device("cpu")
_again = threading.local()


@pytest.fixture
def other_rounding(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Adds a little, but only while a worker recomputes or runs backward, as a GPU's kernels might."""
    for name in ("_recompute", "backward"):
        real = getattr(LayerExecutor, name)

        def wrapped(self: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            before, _again.on = getattr(_again, "on", False), True
            try:
                return real(self, *args, **kwargs)
            finally:
                _again.on = before

        monkeypatch.setattr(LayerExecutor, name, wrapped)

    def rounded(tensor: Tensor) -> Tensor:
        if not getattr(_again, "on", False):
            return tensor
        generator = torch.Generator().manual_seed(5)
        return tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)

    return rounded


@pytest.fixture
def nothing_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerExecutor, "_recording", lambda *args: None)


ROUTERS = {"gpt_oss": GptOssTopKRouter, "qwen3_moe": Qwen3MoeTopKRouter}


def undecided(name: str) -> zoo.ZooModule:
    """All experts are alike to the routers, so that the least difference decides."""
    module = zoo.make_module(name)
    module.model.config.output_router_logits = False  # its loss hangs on the very numbers
    for inner in module.modules():
        if isinstance(inner, ROUTERS[name]):
            for parameter in inner.parameters():
                parameter.requires_grad_(False).zero_()
    return module


def route_otherwise(name: str, rounded: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's input is as it was, but its product is rounded in another way."""
    real = F.linear

    def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = real(source, weight, bias)
        return rounded(out) if weight.shape[0] == 4 else out  # experts

    class Functional:
        def __getattr__(self, key: str) -> Any:
            return linear if key == "linear" else getattr(F, key)

    monkeypatch.setattr(f"{ROUTERS[name].__module__}.F", Functional())


@pytest.mark.parametrize(
    ("name", "devices", "microbatches"), [("gpt_oss", 2, 3), ("qwen3_moe", 2, 3), ("gpt_oss", 1, 1)]
)
def test_tokens_go_to_the_same_experts(
    name: str, devices: int, microbatches: int, other_rounding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batches = undecided(name), zoo.make_batches(name)
    plain = run("auto", module, batches)
    route_otherwise(name, other_rounding, monkeypatch)
    plan = harness.per_call(5, 3) + "; recompute ahead" if microbatches > 1 else None
    weight = "targets" if microbatches > 1 else None
    result = run(ours(num_microbatches=microbatches, plan=plan, loss_weight=weight), module, batches, devices=devices)
    assert_close_overall(plain, result, 0.01)


def test_they_would_go_elsewhere(
    other_rounding: Any, nothing_written_down: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is what the others guard against: without what they test, gradients are far off."""
    module, batches = undecided("gpt_oss"), zoo.make_batches("gpt_oss")
    plain = run("auto", module, batches)
    route_otherwise("gpt_oss", other_rounding, monkeypatch)
    result = run(ours(num_microbatches=3, plan=harness.per_call(5, 3)), module, batches, devices=2)
    assert harness.relative_distance(plain.grads[1], result.grads[1]) > 0.1


class Mixed(nn.Module):
    """Two routers, one behind the other, whose every choice hangs on the rounding."""

    def __init__(self, rounded: Callable[[Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        self.rounded, self.reentrant = rounded, reentrant
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def mix(self, x: Tensor, shift: int) -> Tensor:
        scores = self.rounded(x.new_zeros(len(x), 4)).roll(shift, 1)
        weights, chosen = scores.softmax(1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == (i + shift) % 4)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + self.drop(out)

    def forward(self, x: Tensor) -> Tensor:
        for shift in (0, 2):
            x = checkpoint(self.mix, x, shift, use_reentrant=self.reentrant)
        return x


class Net(pl.LightningModule):
    def __init__(self, rounded: Callable[[Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Mixed(rounded, reentrant) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_dropout_and_a_checkpoint_inside(other_rounding: Any, reentrant: bool) -> None:
    """Which chooses a third time, in backward."""
    torch.manual_seed(3)
    batches = [[torch.randn(6, 8), torch.arange(6) % 3] for _ in range(3)]
    nets = [Net(lambda x: x, reentrant), Net(other_rounding, reentrant)]
    nets[1].load_state_dict(nets[0].state_dict())
    options = {"num_microbatches": 3, "plan": harness.per_call(4, 3)}
    same, other = [run(ours(**options), net, batches, devices=2) for net in nets]
    assert_close_overall(same, other, 0.01)


class Router(Mixed):
    """A hook on its dropout looks at what it is given, by an operation like the layer's own choice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        weights, chosen = x[:, 4:].softmax(1).topk(2)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            x = x.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x


def test_what_a_hook_that_only_looks_chooses_is_not_the_layers() -> None:
    """The recomputation leaves the hook out."""
    torch.manual_seed(3)
    net = Net(lambda x: x, False)
    net.blocks = nn.ModuleList(Router(lambda x: x, False) for _ in range(2))
    for block in net.blocks:
        block.drop.p = 0.0  # type: ignore[union-attr, assignment]
        block.drop.register_forward_hook(lambda module, args, out: out[:, :4].topk(2) and None)  # type: ignore[union-attr]
    batches = [[torch.randn(6, 8), torch.arange(6) % 3] for _ in range(3)]
    plain = run("auto", net, batches)
    assert_same(plain, run(ours(num_microbatches=3, plan=harness.per_call(4, 3)), net, batches, devices=2))


def test_who_does_not_choose_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first batch."""
    made: list[str] = []

    class Counted(DiscreteOpRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append("")

    monkeypatch.setattr(layer_executor, "DiscreteOpRecorder", Counted)
    for microbatches, calls_made in ((3, 6 * 3), (1, 6)):
        made.clear()
        run(ours(num_microbatches=microbatches), zoo.make_module("llama"), zoo.make_batches("llama"), devices=2)
        assert len(made) <= calls_made


def test_what_is_chosen_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As boundary tensors are, a byte each: two of four experts for a token, and its largest score in each head.

    Attention with sinks asks where that is and does not use it, which nobody can see.
    """
    found = []
    for recording in (LayerExecutor._recording, lambda *args: None):
        monkeypatch.setattr(LayerExecutor, "_recording", recording)
        report = run(ours(num_microbatches=3), zoo.make_module("gpt_oss"), zoo.make_batches("gpt_oss", 2)).report
        assert report is not None
        found.append([call["boundary_bytes"] for call in report["costs"]["calls"]])
    chosen = 2 * 12 * (2 + 4)
    assert [with_ - without for with_, without in zip(*found, strict=True)] == [0, chosen, chosen, 0, 0]


# ------------------------------------------------------------------------------------------------------- one by one


CHOOSE: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk along": lambda x: torch.topk(x, 2, dim=0, sorted=False),
    "sort": lambda x: x.sort(descending=True),
    "stable": lambda x: torch.sort(x, dim=0, stable=True),
    "argsort": lambda x: x.argsort(),
    "max": lambda x: x.max(dim=1),
    "min, kept": lambda x: x.min(0, keepdim=True),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "median": lambda x: x.median(1),
    "cummax": lambda x: x.cummax(1),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "multinomial": lambda x: x.softmax(1).multinomial(2),
    "comparison": lambda x: x[:, :2] > x[:, 2:4],
    "with a number": lambda x: x.mean(1) >= 0.0,
    "to integers": lambda x: (100 * x.mean(1)).long(),
    "to Python": lambda x: float(x.sum().detach()),
    "equal": lambda x: torch.equal(x, x.detach().clone().zero_()),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True).argmax(1),
}


@pytest.fixture
def numbers() -> Iterator[Tensor]:
    torch.manual_seed(1)
    yield torch.randn(6, 40)


@pytest.mark.parametrize("name", CHOOSE)
def test_each_operation_chooses_again(name: str, numbers: Tensor) -> None:
    """Other numbers, other random ones too: the same integers, and the values and gradients of where they point."""
    recording = DiscreteOpRecorder(CPU, [numbers])
    with recording:
        first = CHOOSE[name](numbers)
    assert recording.made
    _, choices = recording.saved(lambda packed: HostTensor(packed, None))
    other = torch.randn(6, 40).requires_grad_()
    replay = DiscreteOpReplayer(CPU, [other], choices, lambda copy: copy.tensor)
    with replay:
        second = CHOOSE[name](other)
    assert replay.ended()
    if not isinstance(first, tuple):
        assert (
            torch.equal(first, second) and first.dtype == second.dtype if isinstance(first, Tensor) else first == second
        )
        return
    assert torch.equal(first.indices, second.indices) and second.indices.dtype == torch.int64
    assert first.values.shape == second.values.shape
    second.values.sum().backward()
    assert other.grad is not None
    assert float(second.values.detach().sum()) == pytest.approx(float((other.grad * other.detach()).sum()))


def test_what_is_large_or_no_choice_is_not_written_down(numbers: Tensor) -> None:
    recording = DiscreteOpRecorder(CPU, [numbers])
    with recording:
        (numbers > 0).float() * numbers
        numbers.relu().softmax(1).long()
        torch.arange(40).topk(3)
        F.dropout(numbers)
        F.scaled_dot_product_attention(numbers[None], numbers[None], numbers[None])
    assert not recording.made


def test_positions_take_as_few_bytes_as_they_can() -> None:
    for size, nbytes in ((255, 1), (256, 2), (40_000, 4)):
        recording = DiscreteOpRecorder(CPU, [])
        with recording:
            torch.randn(8, size).topk(4)
        packed, _ = recording.saved(lambda packed: HostTensor(packed, None))
        assert packed is not None and packed.nbytes == 8 * 4 * nbytes
