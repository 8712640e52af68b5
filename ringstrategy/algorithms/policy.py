"""What is chosen parameter by parameter, when buckets are planned: its codec, and whether it is averaged at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective

Policy = Callable[[str, Parameter], Codec]
Local = Callable[[str, Parameter], bool]


@dataclass(frozen=True)
class SmallExact:
    """Sends large matrices with `codec`, and small, sensitive parameters with `small`, by default exactly.

    Small are: fewer than `below` elements, one dimension or none (biases, norms), and the `names`. They are
    in buckets of their own: usually one, since they are few, which uses the messages of the next bucket if it can.

    Args:
        codec: for all other parameters.
        small: for small ones.
        below: elements. Larger: more parameters travel by `small`: closer, more bytes.
        vectors: parameters with fewer than two dimensions are small, however long.
        names: shell patterns of parameter names that are small too, such as "*embedding*" or "head.*".
    """

    codec: Codec
    small: Codec = Identity()  # noqa: RUF009  (frozen)
    below: int = 1024
    vectors: bool = True
    names: Iterable[str] = ()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All that it may choose; so a collective can refuse one before there are parameters to ask for."""
        return self.codec, self.small

    def __post_init__(self) -> None:
        for codec in self.codecs:
            if not isinstance(codec, Codec):
                raise TypeError(f"SmallExact takes codecs such as ringstrategy.Identity(), got {codec!r}")
        if type(self.below) is not int or self.below < 0:
            raise ValueError(f"below is a number of elements >= 0, got {self.below!r}")
        if isinstance(self.names, str):
            raise TypeError(f"names is a list of patterns, got the one string {self.names!r}: pass [{self.names!r}]")
        object.__setattr__(self, "names", tuple(sorted(set(self.names))))  # a set's order differs between processes

    def __call__(self, name: str, parameter: Parameter) -> Codec:
        """The codec for this parameter."""
        small = (
            parameter.numel() < self.below
            or (self.vectors and parameter.dim() < 2)
            or any(fnmatchcase(name, pattern) for pattern in self.names)
        )
        return self.small if small else self.codec


def check_codec(codec: Codec | Policy, collective: Collective) -> None:
    """Raise with the cure unless it is a codec or a policy, whose codecs the collective can carry."""
    if isinstance(codec, type) or not (isinstance(codec, Codec) or callable(codec)):
        raise TypeError(
            "codec is a Codec such as ringstrategy.Identity(), or a policy, a function (name, parameter) -> Codec, "
            f"got {codec!r}"
        )
    for each in (codec,) if isinstance(codec, Codec) else getattr(codec, "codecs", ()):
        collective.check(each)


def check_feedback(error_feedback: bool) -> None:
    """TypeError unless it is a choice."""
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback is True or False, got {error_feedback!r}")


def codec_of(codec: Codec | Policy, collective: Collective, name: str, parameter: Parameter) -> Codec:
    """The parameter's codec; TypeError if a policy gives none."""
    if isinstance(codec, Codec):
        return codec
    chosen = codec(name, parameter)
    if not isinstance(chosen, Codec):
        raise TypeError(f"the policy gave {name} {chosen!r}, which is no Codec such as ringstrategy.Identity()")
    collective.check(chosen)
    return chosen


def described(value: object) -> str:
    """Text for comparing an argument between ranks: the `repr` of our objects, the name of users' functions.

    A `repr` of theirs may hold an address, or a set in the order of this process. Ranks whose functions do different
    things differ in what comes of it, which they compare too.
    """
    if value is None or isinstance(value, Codec | SmallExact):
        return repr(value)
    if isinstance(value, partial):
        return f"partial({described(value.func)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def check_local(local: Local | None) -> None:
    """Raise a TypeError unless it can be asked."""
    if local is not None and not callable(local):
        raise TypeError(f"local is a function (name, parameter) -> bool, got {local!r}")


def split(parameters: Mapping[str, Parameter], local: Local | None) -> tuple[dict[str, Parameter], list[str]]:
    """The parameters to be averaged, and the names of the local ones."""
    shared, names = {}, []
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run one forward pass before training starts")
        if getattr(parameter, "ring_local", False) or (local is not None and local(name, parameter)):
            names.append(name)
        else:
            shared[name] = parameter
    return shared, names
