"""Cut a model into fragments that are exchanged at different times (Streaming DiLoCo, Douillard et al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.nn import Parameter

_NUMBERED = re.compile(r"^(?:.*?\.)?\d+(?=\.)")  # up to the first number: "model.layers.3"
_EMBEDDING = re.compile(r"embed|(^|[._])(emb|wte|wpe)([._]|$)")


def cut_fragments(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """At most `count` fragments of whole layers, with about the same bytes; a function of names, shapes and dtypes.

    Layers go by their names: a numbered module ("layers.3") is one, any other module with parameters of its own is one.
    They are dealt out in order, each to the fragment that has least so far: so layers of one size are strided over the
    fragments. Embeddings are a fragment of their own, unless they are smaller than half of one. There are fewer
    fragments if there are fewer layers.
    """
    layers: dict[str, dict[str, Parameter]] = {}
    for name, parameter in parameters.items():
        layers.setdefault(_layer(name), {})[name] = parameter
    embeddings = {name: parameter for name, parameter in parameters.items() if _EMBEDDING.search(name.lower())}
    apart = 2 * count * _nbytes(embeddings) >= _nbytes(parameters) and len(embeddings) < len(parameters)
    if count > 1 and apart:
        layers = {
            layer: rest
            for layer, members in layers.items()
            if (rest := {name: value for name, value in members.items() if name not in embeddings})
        }
        return [embeddings, *_dealt(layers, count - 1)]
    return _dealt(layers, count)


def _dealt(layers: Mapping[str, Mapping[str, Parameter]], count: int) -> list[dict[str, Parameter]]:
    fragments: list[dict[str, Parameter]] = [{} for _ in range(min(count, len(layers)))]
    for members in layers.values():
        min(fragments, key=_nbytes).update(members)
    return fragments


def _layer(name: str) -> str:
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0]


def _nbytes(parameters: Mapping[str, Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
