"""Layers from files by the names in use, and back into a copy of such a file under the same names."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from headway.core import checks, configs, weights
from headway.core.convert import factored, left_out
from headway.core.factored import FactoredLayer, a_layer
from headway.core.files import open_tensors, workshop, write_tensors
from headway.core.forms import Cap, Form, Sight
from headway.core.layer import AttentionLayer
from headway.core.positions import OffsetTable, Rotary
from headway.core.stored import Stored, open_weights

# Where attention number N lies: what the stem ends with, and whether its keys are of another sequence.
STEMS = (
    ("encoder.layer.{}.attention.", False), ("encoder.layer.{}.attention.attn.", False),
    ("transformer.layer.{}.attention.", False), ("h.{}.attn.", False), ("h.{}.crossattention.", True),
    ("layers.{}.self_attn.", False), ("layers.{}.attention.", False), ("layers.{}.encoder_attn.", True),
    ("block.{}.layer.0.SelfAttention.", False), ("block.{}.layer.1.EncDecAttention.", True), ("blk.{}.", False))
HALF = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "gpt_neox",
        "qwen3_next")  # kinds of model whose planes are (j, j + t/2)
PAIRS = ("cohere",)  # and those whose planes are (2j, 2j + 1)
# Kinds of model that share their names with others, of other functions.
BERTS = ("bert", "roberta", "distilbert", "electra", "vit", "dinov2", "align_text_model", "camembert",
         "chinese_clip_text_model", "clap_text_model", "data2vec-text", "data2vec-vision", "deit",
         "dinov2_with_registers", "dpr", "dpt", "ernie", "esm", "flava_image_model", "flava_text_model", "layoutlm",
         "rembert", "roberta-prelayernorm", "splinter", "tapas", "visual_bert", "xlm-roberta")
BARTS = ("whisper", "bart", "opt", "marian", "pegasus", "mbart", "aimv2_vision_model", "altclip_vision_model",
         "blenderbot", "blenderbot-small", "chinese_clip_vision_model", "clip_vision_model", "clipseg_vision_model",
         "led", "m2m_100", "metaclip_2_vision_model", "mvp", "nllb-moe", "plbart", "siglip2_text_model",
         "siglip_text_model", "siglip_vision_model", *configs.MASKED)
GPTS = ("gpt2", "imagegpt", "openai-gpt")
T5S = ("longt5", "mt5", "switch_transformers", "t5")
LESS_ONE = ("gemma3", "gemma3_text", "qwen3_next")  # norms stored as the gain less 1
BESIDE = re.compile(r"(output\.)?LayerNorm\.|rotary_emb\.inv_freq$|(masked_)?bias$|ffn|attn_norm|post_attention")
FOREIGN = {  # what a file may hold that no form here has: part of a tensor's name, and what it is called
    "rotary": "rotary positions of an unknown kind", "distance_embedding": "relative position biases",
    "rel_pos": "relative position biases"}
QUANTISED = ("qweight", "weight_packed", "_blocks", "qzeros", "quant_state", "weight_scale")


def from_checkpoint(
    path: str | os.PathLike[str], layer: int, *, heads: int | None = None, stack: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionLayer | FactoredLayer:
    """Attention number ``layer`` (from 0) of a stored model, by the names in use: BERT, ViT, MPNet, GPT-2,
    GPT-NeoX, the Llama family (Mistral, Qwen, SmolLM, Gemma, Cohere, gpt-oss), T5 and Whisper, with any prefix.

    path: a safetensors file, a folder or an index of several, or a GGUF file (with the package gguf). config.json
    beside it gives heads, rotary settings and windows; without one ``heads`` is needed, and models that need more
    are refused. stack: "encoder", "decoder" or "cross" where there are several, or the beginning of the names.
    Tensors are read into ``dtype``: in float32 the low rank of Θ_i would end at 1e-7.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        checks.refuse("dtype", "torch.float64, torch.float32 or a half precision", repr(dtype),
                      "dtype=torch.float64")
    found = _Found.of(_path("path", path), layer, heads, stack)
    made, tensors = found.layer(dtype)
    return weights.plain(made, tensors, found.at) or made


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        checks.refuse(name, "a path", f"{value!r} ({type(value).__name__})", "the folder of a model")
    return Path(value)


def factors_from_checkpoint(path: str | os.PathLike[str], layer: int, heads: int | None = None) -> FactoredLayer:
    """What ``from_checkpoint`` reads, in factors whatever its form: biases stand where the file has them."""
    return _Found.of(_path("path", path), layer, heads, None).layer(torch.float64)[0]


def to_checkpoint(
    layer: AttentionLayer | FactoredLayer, source: str | os.PathLike[str], out: str | os.PathLike[str],
    number: int, *, heads: int | None = None, stack: str | None = None, tolerance: float = 1e-6,
) -> None:
    """A copy of a stored model in which attention number ``number`` is ``layer``: same names, same layout, same
    dtypes. source and out: two safetensors files, or two folders.

    The layer must have the form that the file's config says, and heads of the size that is stored there; heads that
    it lacks stay silent. A plain layer is factored. What that leaves out, and biases that the file has no place
    for, must be below ``tolerance`` of the rest.
    """
    start, target = _path("source", source), _path("out", out)
    a_layer(layer)
    if start.suffix == ".gguf":
        checks.refuse("source", "safetensors files", "a GGUF file, which is read only", "the model as safetensors")
    if start.suffix == ".json":
        checks.refuse("source", "a safetensors file, or the folder of several", "an index", str(start.parent))
    whole = start.is_dir()
    if start.exists() and whole == (target.suffix == ".safetensors"):
        checks.refuse("out", f"the name of a {'folder' if whole else 'safetensors file'}, as source is one",
                      str(target), "another name")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        checks.refuse("out", "a new name", f"{target}, which is there already", "another name")
    found = _Found.of(start, number, heads, stack)
    fitted = _fitted(layer, found, checks.number("tolerance", tolerance))
    files = {found.stored.files[place.name] for place in found.at.values()}
    changed = {place.name: found.stored[place.name] for place in found.at.values()}
    for place in found.at.values():
        weights.quantised(place.name, changed[place.name])
    weights.write(fitted, changed, found.at, found.shape, tolerance)
    if not whole:
        _copy(files.pop(), target, changed)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with workshop(target) as hidden:
        inside = hidden / target.name
        inside.mkdir()
        for file in sorted(start.iterdir()):
            if file in files:
                _copy(file, inside / file.name, changed)
            elif file.is_file():
                shutil.copyfile(file, inside / file.name)
        os.replace(inside, target)


def _copy(source: Path, out: Path, changed: Mapping[str, Tensor]) -> None:
    with open_tensors(source) as file:
        tensors = {name: changed[name] if name in changed else file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        words = file.metadata() or {}
    write_tensors(out, tensors, words)


@dataclass(frozen=True)
class _Found:
    """One attention of a stored model: where its parts lie, and all that the weights do not say."""

    path: Path
    stored: Stored
    at: Mapping[str, weights.Place]
    shape: weights.Shape
    form: Form
    cross: bool

    @classmethod
    def of(cls, path: Path, number: int, heads: int | None, stack: str | None) -> _Found:
        checks.whole("layer", number, 0)
        if stack is not None and not isinstance(stack, str):
            checks.refuse("stack", "a word", f"{stack!r} ({type(stack).__name__})",
                          "stack='encoder', 'decoder', 'cross' or the beginning of the names")
        stored = open_weights(path)
        stem, cross = _stem(path, stored, number, stack)
        first = stored[f"{stem}c_attn.weight"].shape if f"{stem}c_attn.weight" in stored else (0, 1)
        at = weights.places(stored, stem, inputs_first=first[0] < first[1])
        if at is None:
            _unread(path, stored, stem)
        at = dict(at)
        _left(path, stored, stem, at)
        config = configs.text_part(stored.config) if "vision" not in stem else None
        kind = str(configs.get(config, "model_type")) if config is not None else None
        named = _Named(path, stored, stem, config, kind, number)
        m = named.said(f"{named.side}_attention_heads", *configs.HEADS) if heads is None else heads
        if m is None:
            checks.refuse("heads", "the number of heads, where no config.json stands beside the file", "none",
                          "heads=12")
        m = checks.whole("heads", m)
        rows = at["query"].read(stored, m).shape[0]
        told = named.said("head_dim", "d_kv")
        if told is None and rows % m:
            checks.refuse("heads", f"a divisor of {rows}, the rows of query", m, "another number of heads")
        size = checks.whole("config.head_dim", told or rows // m)
        if rows == 2 * m * size and kind == "qwen3_next":
            at, rows = weights.gated(at), m * size
        if rows != m * size:
            checks.refuse("heads", f"as many as make the {rows} rows of query, {size} for each", m,
                          f"heads={rows // size}" if rows % size == 0 else "a config.json of this model")
        shape = weights.Shape(m, size, size**-0.5)
        form, shape = _settled(named, at, shape, cross)
        return cls(path, stored, at, shape, form, cross)

    def layer(self, dtype: torch.dtype) -> tuple[FactoredLayer, dict[str, Tensor]]:
        """The factors, and the tensors that they were read from."""
        tensors = {place.name: self.read(place.name, dtype) for place in self.at.values()}
        return weights.read(tensors, self.at, self.shape, self.form, self.cross), tensors

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        value = self.stored[name]
        weights.quantised(f"{self.path}: {name}", value)
        return value.to(dtype)


@dataclass(frozen=True)
class _Named:
    """A stored attention by its names and its config, before anything is known of its form."""

    path: Path
    stored: Stored
    stem: str
    config: Any
    kind: str | None  # the config's model_type
    number: int

    @property
    def side(self) -> str:
        return "decoder" if "decoder" in self.stem.split(".") else "encoder"

    def said(self, *names: str, default: Any = None) -> Any:
        return configs.get(self.config, *names, default=default)


def _stem(path: Path, names: Iterable[str], number: int, stack: str | None) -> tuple[str, bool]:
    """What the names of this attention begin with, and whether its keys are of another sequence."""
    stems: dict[str, bool] = {}
    for pattern, cross in STEMS:
        ends = re.compile(rf"(?:^|.*\.){re.escape(pattern.format(number))}")
        for name in names:
            match = ends.match(name)
            if match and (not pattern.startswith("blk") or name.startswith(f"blk.{number}.attn")):
                stems[match[0]] = cross
    # BERT's stem is the beginning of MPNet's.
    stems = {stem: cross for stem, cross in stems.items()
             if not any(other != stem and other.startswith(stem) for other in stems)}
    fits = {stem: cross for stem, cross in stems.items() if stack is None or _named(stem, cross, stack)}
    own = [stem for stem, cross in fits.items() if not cross]
    if len(fits) == 1:
        return next(iter(fits.items()))
    if stack is None and len(own) == 1:
        return own[0], False
    if fits:
        checks.refuse("stack", "which of several is meant", f"{', '.join(sorted(fits))}",
                      "stack='encoder', 'decoder', 'cross' or the beginning of the names")
    if stems:
        checks.refuse("stack", "'encoder', 'decoder', 'cross' or the beginning of names, if there are such",
                      f"{stack!r}, where there are {', '.join(map(repr, sorted(stems)))}", "without stack=")
    listed = sorted(names)
    there = _counted(listed)
    if there:
        got = f"numbers {min(there)} to {max(there)}" if len(there) > 1 else f"number {max(there)} alone"
        checks.refuse(str(path), f"attention number {number}", got, f"number {max(there)}")
    known = ", ".join(f"…{pattern.format(number)}…" for pattern, _ in STEMS[:5])
    got = f"{listed[0]} and {len(listed) - 1} others" if listed else "none"
    return checks.refuse(str(path), f"attention number {number}, tensors named {known}", got,
                         "another layer number, or from_weights(...)")


def _counted(names: Iterable[str]) -> set[int]:
    """The numbers of the attentions that are there, by their names."""
    stems = (f"{pattern}attn" if pattern == "blk.{}." else pattern for pattern, _ in STEMS)
    ends = re.compile("|".join(re.escape(stem).replace(r"\{\}", r"(\d+)") for stem in stems))
    found = (ends.search(name) for name in names)
    return {int(next(part for part in match.groups() if part)) for match in found if match}


def _named(stem: str, cross: bool, stack: str) -> bool:
    if stack == "cross":
        return cross
    return not cross and stack in stem.split(".") if stack in ("encoder", "decoder") else stem.startswith(stack)


def _unread(path: Path, stored: Mapping[str, Any], stem: str) -> NoReturn:
    inside = sorted(name for name in stored if name.startswith(stem))
    blocks = [name for name in inside if any(part in name for part in QUANTISED)]
    if blocks:
        checks.refuse(str(path), "weights as numbers", f"quantised blocks that are not known here ({blocks[0]})",
                      "the model as it was before, or dequantised and stored again")
    checks.refuse(str(path), "query, key, value and output weights under names in use", ", ".join(inside[:4]),
                  "from_weights(...) with its weights")


def _left(path: Path, stored: Mapping[str, Any], stem: str, at: Mapping[str, weights.Place]) -> None:
    """Refuse what belongs to the attention and was not read."""
    known = {place.name for place in at.values()}
    for name in stored:
        for part, words in FOREIGN.items():
            if part in name and name.startswith(stem) and not name.endswith("inv_freq"):
                checks.refuse(str(path), "attention of a known form", f"{words} ({name})", "a model without them")
        if name.startswith(stem) and name not in known and not BESIDE.match(name[len(stem):]):
            checks.refuse(str(path), "attention of projections, norms of heads, sinks and a table of offsets",
                          f"another part ({name})", "headway.FactoredLayer with the factors")


def _settled(
    named: _Named, at: dict[str, weights.Place], shape: weights.Shape, cross: bool
) -> tuple[Form, weights.Shape]:
    """Form and scale, by the names and what the config says."""
    stem, said = named.stem, named.said
    if said("position_embedding_type", default="absolute") != "absolute":
        checks.refuse(str(named.path), "attention of a known form",
                      "relative position biases (position_embedding_type)", "a model without them")
    gain = 1.0 if named.kind in LESS_ONE else 0.0
    shape = replace(shape, eps=checks.number("config.rms_norm_eps", said("rms_norm_eps", default=1e-6)), gain=gain)
    if cross:
        _of_kind(named, *BERTS, *BARTS, *GPTS, *T5S, "umt5")
        return Form(), replace(shape, scale=1.0) if "EncDecAttention" in stem else shape
    if "SelfAttention" in stem or stem.endswith("attention.attn."):
        _of_kind(named, *T5S, "mpnet")
        return _tabled(named, at, shape)
    if named.kind == "gpt2" or re.search(r"(^|\.)h\.\d+\.attn\.$", stem):
        _of_kind(named, *GPTS)
        scale = shape.scale if said("scale_attn_weights", default=True) else 1.0
        scale /= named.number + 1 if said("scale_attn_by_inverse_layer_idx", default=False) else 1
        return Form(sight=Sight(True)), replace(shape, scale=scale)
    if "out" in at and at["out"].name.endswith("out_proj.weight"):  # Whisper
        _of_kind(named, *BARTS)
        return Form(sight=Sight(named.side == "decoder" or named.kind in configs.MASKED)), shape
    if re.search(r"(encoder|transformer)\.layer\.", stem) or named.kind == "vit":
        _of_kind(named, *BERTS)
        return Form(sight=Sight(bool(said("is_decoder", default=False)))), shape
    return _turned(named, shape)


def _of_kind(named: _Named, *kinds: str) -> None:
    """Refuse a model whose tensors have known names, but which is none of those that are known to be read so."""
    if named.kind not in (None, "None", *kinds):
        more = f" and {len(kinds) - 6} more" if len(kinds) > 6 else ""
        checks.refuse(str(named.path), f"a model_type of {', '.join(kinds[:6])}{more}", repr(named.kind),
                      "headway.from_torch(model, path), which asks the module")


def _tabled(named: _Named, at: dict[str, weights.Place], shape: weights.Shape) -> tuple[Form, weights.Shape]:
    """T5, whose scores are not scaled, and MPNet: one table for all layers of a stack, in its first or beside."""
    t5 = "SelfAttention" in named.stem
    top = named.stem.split("block." if t5 else "layer.")[0]
    name = f"{top}{'block.0.layer.0.SelfAttention.' if t5 else ''}relative_attention_bias.weight"
    if name not in named.stored:
        checks.refuse(str(named.path), f"a table of offsets, {name}", "none", "the whole model in one place")
    at["offsets"] = weights.Place(name)
    back = named.side == "decoder"
    far = int(named.said("relative_attention_max_distance", default=128))
    table = OffsetTable(named.stored[name].float().T.contiguous(), "t5", not back, far)
    return Form(offsets=table, sight=Sight(back)), replace(shape, scale=1.0) if t5 else shape


def _turned(named: _Named, shape: weights.Shape) -> tuple[Form, weights.Shape]:
    """The Llama family: everything about positions is in the config."""
    kind, config = named.kind, named.config
    if kind is None:
        checks.refuse(str(named.path), "config.json beside the file, with the rotary settings", "none",
                      "the folder of the model, with its config")
    gguf = named.path.suffix == ".gguf"
    if kind not in (*HALF, *PAIRS) and not gguf:
        checks.refuse(str(named.path), f"a model_type of {', '.join((*HALF, *PAIRS))}", repr(kind),
                      "headway.from_torch(model, path), which asks the module")
    rotary: Rotary | None = None
    if configs.turns(config, named.number):
        pairs = kind in PAIRS or (gguf and kind == "llama")
        rotary, turn = configs.rotary(config, shape.size, named.number, "pairs" if pairs else "half")
        shape = replace(shape, turn=turn)
        divisors = named.stored.divisors()
        if divisors is not None:
            rotary = replace(rotary, frequencies=rotary.omega(shape.size) / divisors)
    scalar = named.said("query_pre_attn_scalar")
    cap = named.said("attn_logit_softcapping") if kind == "gemma2" else None
    causal = not named.said("use_bidirectional_attention", default=False)
    form = Form(rotary, cap=None if cap is None else Cap(float(cap)),
                sight=Sight(causal, configs.window(config, named.number)))
    return form, shape if scalar is None else replace(shape, scale=float(scalar) ** -0.5)


def _fitted(layer: AttentionLayer | FactoredLayer, found: _Found, tolerance: float) -> FactoredLayer:
    """The layer with the heads, sizes and planes of the place it goes to."""
    tensors = {place.name: found.read(place.name, torch.float64) for place in found.at.values()}
    there = weights.read(tensors, found.at, found.shape, found.form, found.cross)
    if isinstance(layer, AttentionLayer):
        layer = _thin(layer, there, tolerance)
    form, other = layer.form.settings(), there.form.settings()
    planes = None if layer.form.rotary is None or there.form.rotary is None else there.form.rotary.layout
    if planes is not None:
        form["rotary"] = {**form["rotary"], "layout": planes}
    if form != other or layer.cross != there.cross:
        checks.refuse("layer", f"the form of the file's: {there.form.describe()}", layer.form.describe(),
                      "another layer number, or a layer learned from this model")
    if planes is not None and layer.form.rotary != there.form.rotary:
        layer = _laid_out(layer, planes)
    layer = _widened(layer.to(torch.float64), there.heads)
    for name, value in there.tensors().items():
        mine = layer.tensors().get(name)
        if name != "offset" and (mine is None or mine.shape != value.shape):
            got = "none" if mine is None else f"shape {tuple(mine.shape)}"
            checks.refuse(f"layer.{name}", f"shape {tuple(value.shape)}, as stored", got,
                          "heads and groups as the file has them")
    return _ordered(layer, there, tolerance)


def _ordered(layer: FactoredLayer, there: FactoredLayer, tolerance: float) -> FactoredLayer:
    """With heads in the order of the table of offsets that is stored: other layers of the model use it too, so it
    must stay as it is."""
    if not isinstance(there.form.offsets, OffsetTable):
        return layer
    stored, mine = (part.tensors()["offsets"] for part in (there, layer))
    # One constant a head changes nothing.
    far = (stored - stored.mean(1, keepdim=True)).unsqueeze(1) - (mine - mine.mean(1, keepdim=True)).unsqueeze(0)
    distance = far.abs().amax(2)
    order: list[int] = []
    for row in distance:
        order.append(min((i for i in range(layer.heads) if i not in order), key=row.__getitem__))
    worst, size = float(distance[range(layer.heads), order].max()), float(stored.abs().max())
    if worst > tolerance * size:
        checks.refuse("layer.offsets", "the table of offsets that is stored, which other layers use too",
                      f"one that differs by {worst:.1e}, whatever the order of the heads",
                      "headway.replace, which changes one layer, or a larger tolerance, which keeps the table")
    heads = ("query", "out", "sink", "gate", *(("key", "value") if layer.groups == layer.heads else ()))
    changed = {name: value[order] for name, value in layer.tensors().items() if name in heads}
    return layer.with_tensors({**changed, "offsets": stored})


def _thin(layer: AttentionLayer, there: FactoredLayer, tolerance: float) -> FactoredLayer:
    """A plain layer as factors of the size that is stored."""
    rest = left_out(layer, there.size, there.value_size)
    if max(rest) > tolerance:
        which = "attention matrices" if rest[0] >= rest[1] else "projections"
        checks.refuse("layer", f"heads of size {there.size}, as stored", f"{which} with {max(rest):.1e} beyond it",
                      f"tolerance={2 * max(rest):.0e}, if that may be left out")
    parts = factored(layer.to(torch.float64), there.size, there.value_size)
    query, key, value = (torch.cat([F, F.new_zeros(F.shape[0], rows - F.shape[1], F.shape[2])], dim=1)
                         for F, rows in ((parts.query, layer.width + 1), (parts.key, layer.width + 1),
                                         (parts.value, layer.width + 1)))
    offset = None if layer.offset is None else layer.offset.to(torch.float64)
    return FactoredLayer(query, key, value, parts.out, offset, Form(sight=Sight(layer.mask == "causal")))


def _laid_out(layer: FactoredLayer, layout: str) -> FactoredLayer:
    """The same layer with its planes in the other layout."""
    rotary = layer.form.rotary
    assert rotary is not None
    t = rotary.coordinates(layer.size)
    planes = torch.arange(t).view(2, -1) if layout == "pairs" else torch.arange(t).view(-1, 2)
    order = torch.cat([planes.T.reshape(-1), torch.arange(t, layer.size)])
    changed: dict[str, Tensor] = {name: value[..., order] for name, value in layer.tensors().items()
                                  if name in ("query", "key", "norm_query", "norm_key")}
    layer = layer.with_tensors(changed)
    return replace(layer, form=replace(layer.form, rotary=replace(rotary, layout=layout)))


def _widened(layer: FactoredLayer, heads: int) -> FactoredLayer:
    """As many heads as are stored: those that are added read nothing and say nothing."""
    more = heads - layer.heads
    if more <= 0 or layer.groups != layer.heads or not layer.form.is_plain:
        return layer

    def wide(F: Tensor) -> Tensor:
        return torch.cat([F, F.new_zeros(more, *F.shape[1:])])

    return layer.with_tensors({name: wide(layer.tensors()[name]) for name in weights.PARTS})
