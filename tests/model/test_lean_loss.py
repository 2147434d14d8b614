"""The loss without logits equals the loss of the logits, and never holds them."""

# Tensor.backward and the like have no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.model import lean_loss
from lightning_roundpipe.model.lean_loss import (
    LeanHead,
    LossOf,
    _Chunks,
    _losses_and_slope,
    chunk_rows,
    lean_logits,
    make_lean,
)
from lightning_roundpipe.planning.meter import Meter

CLASSES, FEATURES = 50, 6


class Model(nn.Module):
    """An output layer, and what is done to its logits."""

    def __init__(self, change: Callable[[Any], Any], bias: bool = True, **cross_entropy: Any) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        self.change = change
        self.cross_entropy = cross_entropy

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.change(self.head(hidden))
        return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **self.cross_entropy)


def shifted(logits: Any) -> Any:
    return logits[:, :-1].float()


def capped(logits: Any) -> Any:
    return (torch.tanh(logits[..., :-1, :] / 3.0) * 3.0).contiguous()


def scaled(logits: Any) -> Any:
    return (0.25 * logits)[:, :-1, :].to(torch.float32)


def widened(logits: Any) -> Any:
    return (0.5 * logits.float())[:, :-1]


def squashed(logits: Any) -> Any:
    return torch.tanh(logits[:, :-1])


def narrowed(logits: Any) -> Any:
    return logits[:, :-1].float().to(torch.bfloat16)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = 2 * torch.randn(3, 8, FEATURES, dtype=dtype)
    labels = torch.randint(0, CLASSES, (3, 8))
    labels[0, 5:] = labels[2, 1:] = -100
    return hidden.requires_grad_(), labels[:, 1:]


def both(
    model: Model, dtype: torch.dtype = torch.float32, rows: int | None = None, autocast: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of the plain loss, and of the lean one. The losses are tripled before backward."""
    found = []
    make_lean(model.to(dtype))
    for lean in (False, True):
        hidden, labels = inputs(dtype)
        model.zero_grad()
        with lean_logits(model, rows) if lean else contextlib.nullcontext(), torch.autocast("cpu", enabled=autocast):
            loss = model(hidden, labels)
        (3 * loss).backward()
        found.append([loss.detach(), *(t.grad for t in (hidden, *model.parameters()) if t.grad is not None)])
    assert len(found[0]) == len(found[1]) == 2 + len(list(model.parameters()))
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    return found[0], found[1]


@pytest.mark.parametrize("rows", [1, 4, 100, None])
@pytest.mark.parametrize("change", [shifted, capped, scaled, widened, squashed])
def test_equals_the_plain_loss(change: Any, rows: int | None) -> None:
    plain, lean = both(Model(change), rows=rows)
    harness.assert_tensors_same(plain, lean, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"label_smoothing": 0.2}, {"ignore_index": 7}, {"reduction": "mean"}]
)
def test_kinds_of_cross_entropy(options: dict[str, Any]) -> None:
    model = Model(shifted, bias=False, **options)
    hidden, labels = inputs()
    if "ignore_index" in options:
        model.change = lambda logits: logits[:, :-1]
        labels = labels.clamp(min=7)
        assert (labels == 7).any()
    plain = model(hidden, labels)
    make_lean(model)
    with lean_logits(model, 5):
        lean = model(hidden, labels)
    gradients = [torch.autograd.grad(loss, [hidden, model.head.weight]) for loss in (plain, lean)]
    harness.assert_tensors_same([plain.detach(), *gradients[0]], [lean.detach(), *gradients[1]], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-14),
        (torch.bfloat16, False, 2e-2),
        (torch.float16, False, 2e-3),
        (torch.float32, True, 2e-2),
    ],
)
def test_formats(dtype: torch.dtype, autocast: bool, tolerance: float) -> None:
    """The loss is in the format that it would have: fp32 where the model casts its logits."""
    change = (lambda logits: logits[:, :-1]) if dtype is torch.float64 else shifted
    plain, lean = both(Model(change), dtype, rows=4, autocast=autocast)
    harness.assert_tensors_same(plain, lean, rtol=tolerance, atol=tolerance)
    assert torch.allclose(plain[0], lean[0], rtol=1e-6 if dtype is not torch.float64 else 1e-14)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", [capped, widened, squashed, narrowed, lambda logits: logits[:, :-1]])
def test_formats_of_other_steps(change: Any, autocast: bool) -> None:
    """Where the model leaves its logits in 16 bits, its loss is in 16 bits too; under autocast it is not."""
    plain, lean = both(Model(change), torch.float32 if autocast else torch.bfloat16, rows=4, autocast=autocast)
    harness.assert_tensors_same(plain, lean, rtol=2e-2, atol=2e-2)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("change", [shifted, capped, scaled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_as_exact_as_the_plain_loss(dtype: torch.dtype, change: Any, smoothing: float) -> None:
    """Both beside the same weights and hidden states in fp64."""
    torch.manual_seed(1)
    model = Model(change, label_smoothing=smoothing).to(dtype)
    make_lean(model)
    hidden = (4 * torch.randn(4, 65, FEATURES)).to(dtype)
    labels = model.head(hidden)[:, :-1].argmax(-1)  # most are likely
    labels[:, ::3] = torch.randint(0, CLASSES, labels[:, ::3].shape)
    labels[:, ::5] = -100
    weights = [parameter.detach().double() for parameter in model.parameters()]

    def gradients(module: Model, hidden: Tensor) -> list[Tensor]:
        hidden = hidden.clone().requires_grad_()
        loss = module(hidden, labels)
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, *module.parameters()])]

    plain = gradients(model, hidden)
    with lean_logits(model, 16):
        lean = gradients(model, hidden)
    double = Model(lambda logits: change(logits).double(), label_smoothing=smoothing).double()
    if change is not capped:  # a cast to fp32 would round
        factor = 0.25 if change is scaled else 1.0
        double.change = lambda logits: factor * logits[:, :-1]
    for parameter, weight in zip(double.parameters(), weights, strict=True):
        parameter.data = weight
    for one, other, exact in zip(plain, lean, gradients(double, hidden.double()), strict=True):
        assert relative_error(other, exact) <= 1.25 * relative_error(one, exact) + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_the_logits_is_rounded_once(dtype: torch.dtype) -> None:
    """Also that of a target whose probability is nearly one, and is one in 16 bits."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 1000)
    target = torch.randint(0, 1000, (64, 1))
    logits[:32].scatter_(1, target[:32], 20.0)
    logits = logits.to(dtype)
    exact = logits.double().softmax(-1).scatter_add(1, target, -torch.ones(64, 1, dtype=torch.float64))
    losses, slope = _losses_and_slope(logits, target, 0.0, differentiate=True)
    assert slope is not None and slope.dtype is dtype
    assert (exact.gather(1, target)[:32].abs() < 1e-2).all()
    limits = torch.finfo(dtype)
    allowed = exact.abs() * limits.eps / 2 * 1.01 + limits.smallest_normal * limits.eps
    allowed.scatter_add_(1, target, torch.full((64, 1), 20 * torch.finfo(torch.float32).eps, dtype=torch.float64))
    assert ((slope.double() - exact).abs() <= allowed).all()
    expected = F.cross_entropy(logits.double(), target[:, 0], reduction="none")
    torch.testing.assert_close(losses[:, 0].double(), expected, rtol=1e-6, atol=4e-6)


def test_an_unlikely_target() -> None:
    """Its probability is 0 in fp32, and its loss is the difference of two logits."""
    logits = torch.zeros(1, 4).index_fill(1, torch.tensor([2]), 500.0)
    losses, slope = _losses_and_slope(logits, torch.tensor([[1]]), 0.0, differentiate=True)
    assert losses.item() == 500.0
    assert slope is not None and slope.tolist() == [[0.0, -1.0, 1.0, 0.0]]


def test_no_tokens() -> None:
    model = Model(lambda logits: logits, reduction="sum")
    make_lean(model)
    hidden = torch.zeros(0, FEATURES, requires_grad=True)
    with lean_logits(model):
        loss = model(hidden, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss == 0
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_what_is_no_number_stays_so() -> None:
    """Also where there is no target: a plain loss passes it on, and that of a part of the tokens must not hide it."""
    model = Model(shifted)
    make_lean(model)
    found = []
    for lean in (False, True):
        hidden, labels = inputs()
        hidden.data[0, 6, 1] = float("nan")
        assert labels[0, 6] == -100
        with lean_logits(model, 4) if lean else contextlib.nullcontext():
            loss = model(hidden, labels)
        found.append([t.isnan() for t in (loss, *torch.autograd.grad(loss, [hidden, *model.parameters()]))])
    assert found[0][1].any() and not found[0][1].all() and found[0][2].all()
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_small_gradients_survive_fp16() -> None:
    """Divided by 4,000 targets, the probability of one of many classes is next to nothing in fp16."""
    model = Model(shifted).half()
    make_lean(model)
    hidden = torch.zeros(1, 4001, FEATURES, dtype=torch.float16, requires_grad=True)
    with lean_logits(model, 512):
        loss = model(hidden, torch.zeros(1, 4000, dtype=torch.long))
    (loss * 2.0**16).backward()
    bias = model.head.bias.grad
    assert bias is not None and bias[1:].min() > 500  # 2^16 / 50 classes
    assert torch.isfinite(bias).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_over_chunks_are_in_fp32(autocast: bool) -> None:
    """In bf16 what a chunk adds to a sum of hundreds is lost: 256 + 1 is 256."""
    model = Model(shifted) if autocast else Model(shifted).bfloat16()
    make_lean(model)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    hidden = torch.ones(1, 2001, FEATURES, dtype=model.head.weight.dtype)
    with lean_logits(model, 1), torch.autocast("cpu", enabled=autocast):
        model(hidden, torch.zeros(1, 2000, dtype=torch.long)).backward()
    for gradient in (model.head.weight.grad, model.head.bias.grad):
        assert gradient is not None
        assert torch.allclose(gradient[0].float(), torch.tensor(1 / CLASSES - 1), rtol=0.01)


def test_without_targets_gradients_are_zero() -> None:
    model = Model(shifted)
    make_lean(model)
    hidden, labels = inputs()
    with lean_logits(model):
        loss = model(hidden, torch.full_like(labels, -100))
    loss.backward()
    assert torch.isnan(loss)
    for t in (hidden, *model.parameters()):
        assert t.grad is not None and not t.grad.any()


@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_only_what_is_trained_gets_gradients(frozen: str) -> None:
    model = Model(shifted)
    make_lean(model)
    hidden, labels = inputs()
    if frozen != "head":
        hidden = hidden.detach()
    if frozen != "hidden":
        model.requires_grad_(False)
    with lean_logits(model):
        loss = model(hidden, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (model.head.weight.grad is None) == (frozen == "head")
        assert (hidden.grad is None) == (frozen == "hidden")


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has none of its own before 2.13")
def test_equals_torchs_own() -> None:
    model = Model(shifted)
    make_lean(model)
    hidden, labels = inputs()
    with lean_logits(model, 4):
        ours = model(hidden, labels)
    flat = hidden[:, :-1].reshape(-1, FEATURES)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4, chunking_method=None)
    theirs = F.linear_cross_entropy(
        flat, model.head.weight, labels.reshape(-1), linear_bias=model.head.bias, options=options
    )
    weights = [hidden, *model.parameters()]
    gradients = [torch.autograd.grad(loss, weights) for loss in (theirs, ours)]
    harness.assert_tensors_same([theirs.detach(), *gradients[0]], [ours.detach(), *gradients[1]], rtol=2e-6, atol=1e-6)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most tokens that any tensor had a number for each class of."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.ndim and t.shape[-1] == zoo.VOCAB:
                self.tokens = max(self.tokens, t.numel() // zoo.VOCAB)
        return out


def largest(run: Callable[[], Any]) -> int:
    with Largest() as mode:
        run()
    return mode.tokens


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gpt_oss", "qwen3_moe"])
def test_models_never_hold_their_logits(name: str) -> None:
    """And give the loss that they give otherwise, with what is added to it."""
    model, batch = zoo.make_module(name).model, zoo.make_batches(name, 1, samples=16)[0]
    plain: list[Any] = []
    tokens = batch["input_ids"].numel()
    assert largest(lambda: plain.append(model(**batch).loss)) == tokens
    plain[0].backward()
    expected = harness.gradients(model)
    model.zero_grad()
    make_lean(model)
    with lean_logits(model, rows=40):
        assert largest(lambda: plain.append(model(**batch).loss)) == 40  # of 192
        assert largest(lambda: plain[1].backward()) <= zoo.WIDTH  # that of the weights, transposed
    harness.assert_tensors_same(plain[0].detach(), plain[1].detach())
    harness.assert_tensors_same(expected, harness.gradients(model))
    assert model(**batch).logits.shape[-1] == zoo.VOCAB  # outside, they are there


def test_soft_caps_of_gemma_2() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    config = Gemma2Config(vocab_size=zoo.VOCAB, **sizes, **heads, initializer_range=0.5, final_logit_softcapping=2.0)
    model, batch = Gemma2ForCausalLM(config), zoo.make_batches("llama", 1)[0]
    plain = model(**batch).loss
    make_lean(model)
    with lean_logits(model, 7):
        lean = model(**batch).loss
    uncapped = F.cross_entropy(model.model(batch["input_ids"])[0][0, :1] @ model.lm_head.weight.T, torch.tensor([0]))
    assert uncapped.isfinite()
    model.config.final_logit_softcapping = None
    assert abs(model(**batch).loss - plain) > 0.1  # the cap matters
    harness.assert_tensors_same(plain.detach(), lean.detach())


# ------------------------------------------------------------------------------------------------------------- refusals


@contextlib.contextmanager
def stood_for() -> Iterator[Any]:
    model = Model(shifted)
    make_lean(model)
    with lean_logits(model):
        yield model.head(torch.zeros(2, 4, FEATURES))


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda x: torch.log_softmax(x, -1), "log_softmax"),
        (lambda x: x + 1, "unsupported operand"),
        (lambda x: x.argmax(-1), "they have no argmax"),
        (lambda x: torch.add(x, 1), "add"),
        (lambda x: x * torch.ones(CLASSES), "mul by a Tensor"),
        (lambda x: x[..., :3], "an index into the classes"),
        (lambda x: x[:, :, 1], "an index into the classes"),
        (lambda x: x.reshape(-1), "reshape"),
        (lambda x: F.cross_entropy(x, torch.zeros(2, 4)), "logits of shape"),
        (lambda x: F.cross_entropy(x.view(-1, CLASSES), torch.zeros(8).long(), torch.ones(CLASSES)), "weights of cl"),
        (lambda x: F.cross_entropy(x.view(-1, CLASSES), torch.zeros(8).long(), reduction="none"), "reduction"),
    ],
)
def test_what_needs_logits_is_refused_by_name(use: Any, what: str) -> None:
    with stood_for() as logits:
        assert logits.shape == logits.size() == (2, 4, CLASSES) and logits.dim() == 3
        with pytest.raises((NotImplementedError, AttributeError, TypeError), match=what) as failure:
            use(logits)
        assert isinstance(failure.value, TypeError) or "task.lean_loss=false" in str(failure.value)


def test_heads_that_cannot_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(zoo.make_module("llama").model, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"output layer of PeftModel is a Linear.*task.lean_loss=false"):
        make_lean(model)
    with pytest.raises(ValueError, match=r"call make_lean\(\) on this PeftModel"), lean_logits(model):
        pass
    unused = Model(shifted)
    make_lean(unused)
    with pytest.raises(ValueError, match="has not called its output layer"), lean_logits(unused):
        pass
    unused.head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"), lean_logits(unused):
        unused(*inputs())


def test_backward_only_once() -> None:
    model = Model(shifted)
    make_lean(model)
    with lean_logits(model):
        loss = model(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_the_head_stays_what_it_is() -> None:
    model = zoo.make_module("qwen3").model
    before = list(model.state_dict())
    make_lean(model)
    make_lean(model)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear) and type(head) is LeanHead
    assert head.weight is model.get_input_embeddings().weight
    assert list(model.state_dict()) == before


def test_chunks() -> None:
    """As many numbers as the hidden states, at least; never fewer rows than products need."""
    assert chunk_rows(49_000, 4096, 128_256, trained=True) == 1565
    assert chunk_rows(8_000, 4096, 128_256, trained=True) == 1024
    assert chunk_rows(8_000, 1024, 128_256, trained=True) == 512
    assert chunk_rows(49_000, 4096, 128_256, trained=False) == 1565
    assert chunk_rows(8, 64, 100_000, trained=False) == 8
    assert chunk_rows(1, 1, 10, trained=True) == 1


class Operations(TorchDispatchMode):
    """Names of all operations but views, and the bytes of what each has made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            known = {id(leaf) for leaf in tree_leaves((args, kwargs))}
            new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in known]
            self.made.append((str(func), sum(leaf.nbytes for leaf in new)))
        return out


def test_products_add_to_the_sums_without_memory_of_their_own() -> None:
    """As a GPU's kernels do: those of tensors without data stand for them."""
    features, classes, rows = 2048, 50_000, 256
    hidden = torch.empty(2 * rows, features, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(classes, features, dtype=torch.bfloat16, device="meta")
    chunks = _Chunks(hidden, weight, None, [True, True, False])
    slope = torch.empty(rows, classes, dtype=torch.bfloat16, device="meta")
    chunks._add(0, hidden[:rows], slope)  # after which is known what the device is able to
    with Operations() as seen:
        chunks._add(rows, hidden[rows:], slope)
    assert seen.made == [("aten.mm.out", 0), ("aten.addmm.dtype_out", 0)]


def chunks_on_meta(dtype: torch.dtype) -> tuple[list[Tensor], LossOf, int]:
    """Hidden states, weights and targets of three chunks, and the number of logits of each."""
    features, classes, rows = 2048, 50_000, 256
    hidden = torch.empty(3 * rows, features, dtype=dtype, device="meta")
    weight = torch.empty(classes, features, dtype=dtype, device="meta")
    target = torch.empty(3 * rows, dtype=torch.long, device="meta")
    return [hidden, weight, target], LossOf((("to", torch.float32),), -100, "mean", 0.0, rows), rows * classes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, ["mm", "_to_copy", "_log_softmax", "gather", "exp", "scatter_", "mm", "addmm"]),
        (torch.float32, ["mm", "_log_softmax", "gather", "exp", "scatter_", "mm", "addmm_"]),
    ],
)
def test_passes_over_the_logits(dtype: torch.dtype, expected: list[str]) -> None:
    """What touches the logits of a chunk. (gather and scatter_ do so at one number of each token.)"""
    (hidden, weight, target), how, logits = chunks_on_meta(dtype)
    chunks = _Chunks(hidden, weight, None, [True, True, False])
    chunks.loss(target, how)  # after which is known what the device is able to

    class Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            involved = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            if not func.is_view and "empty" not in str(func) and any(t.numel() == logits for t in involved):
                seen.append(func._schema.name.removeprefix("aten::"))
            return out

    seen: list[str] = []
    with Passes():
        chunks.loss(target, how)
    assert seen == 3 * expected


@pytest.mark.parametrize(("dtype", "bytes_of_a_logit"), [(torch.bfloat16, 10), (torch.float32, 8)])
def test_memory_of_a_chunk(dtype: torch.dtype, bytes_of_a_logit: int) -> None:
    """It holds the logits, their cast and their logarithms at most, and nothing of the chunk before."""
    tensors, how, logits = chunks_on_meta(dtype)
    hidden, weight, target = tensors
    chunks = _Chunks(hidden, weight, None, [True, True, False])
    chunks.loss(target, how)
    with Meter(read_machine("rtx4090x8")) as meter:
        meter.ignore([*tensors, *(gradient for gradient in chunks.gradients if gradient is not None)])
        chunks.loss(target, how)
    assert bytes_of_a_logit * logits <= meter.work.memory.peak < (bytes_of_a_logit + 0.5) * logits


@pytest.mark.parametrize("abilities", [(False, True), (False, False)])
def test_other_products_give_the_same_sums(monkeypatch: pytest.MonkeyPatch, abilities: tuple[bool, bool]) -> None:
    """Where torch has no product that adds to an fp32 sum it is made in pieces, and on the CPU of fp32 factors."""

    def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)

    torch.manual_seed(0)
    hidden, weight = torch.randn(12, FEATURES).bfloat16(), torch.randn(CLASSES, FEATURES).bfloat16()
    slopes = torch.randn(12, CLASSES).bfloat16()
    monkeypatch.setattr(lean_loss, "_multiplies", lambda device: abilities)
    monkeypatch.setattr(lean_loss, "PIECE", 7 * FEATURES)
    chunks = _Chunks(hidden, weight, None, [True, True, False])
    with monkeypatch.context() as patch:
        if abilities[1]:
            real = torch.mm
            patch.setattr(torch, "mm", lambda *args, **kwargs: (mm if "out_dtype" in kwargs else real)(*args, **kwargs))
        for start in (0, 5):
            end = 5 if start == 0 else 12
            chunks._add(start, hidden[start:end], slopes[start:end])
    by_hidden, by_weight, _ = chunks.gradients
    assert by_hidden is not None and by_weight is not None and by_weight.dtype is torch.float32
    torch.testing.assert_close(by_weight, slopes.float().t() @ hidden.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_hidden, slopes @ weight, rtol=1e-2, atol=1e-2)
